"""A LoRA at degrees above 1: each rank changes its own tokens; the latents are those of one worker."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.members import Member, Pool
from tests.pipelines.loras import random_lora, save_lora, uses
from tests.pipelines.models import PARALLEL, families, final_latents, make_inputs, start
from tridentserve.models.families import FAMILIES
from tridentserve.parallel import sequence_parallel
from tridentserve.pipelines import DenoisingState

Model = Callable[[str], Path]
TOLERANCE = 1e-4
VARIANTS = tuple(name for name in PARALLEL if FAMILIES[name].loras)


def denoise(member: Member, folder: Path, state: dict[str, Any]) -> Any:
    adapter, begun = member.adapter(folder), DenoisingState(**state)
    with sequence_parallel(member.group("lora")):
        return adapter.step(begun, begun.num_steps).tensors["latents"]


@pytest.mark.parametrize("variant", families(*VARIANTS, quick=("flux",)))
def test_the_degree_does_not_change_what_a_lora_does(pool: Pool, model: Model, tmp_path: Path, variant: str) -> None:
    folder = Path(shutil.copytree(model(variant), tmp_path / variant))
    save_lora(folder, "style", random_lora(folder))
    inputs = make_inputs(variant=variant, loras=uses(folder, "style"))
    alone = final_latents(folder, inputs)
    for latents in pool.run(denoise, 2, folder, asdict(start(folder, inputs))):
        assert not isinstance(latents, Exception), latents
        assert (latents - alone).abs().max() < TOLERANCE
    plain = final_latents(folder, make_inputs(variant=variant))
    assert (plain - alone).abs().max() > 100 * TOLERANCE
