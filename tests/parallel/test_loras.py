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
from tests.pipelines.models import PARALLEL, families, final_latents, load_stage, make_inputs, start
from tridentserve.models.families import FAMILIES
from tridentserve.parallel import sequence_parallel
from tridentserve.pipelines import DenoisingState
from tridentserve.stages import Stage

Model = Callable[[str], Path]
TOLERANCE = 1e-4
VARIANTS = tuple(name for name in PARALLEL if FAMILIES[name].loras)


def denoise(member: Member, folder: Path, states: list[dict[str, Any]]) -> Any:
    adapter, begun = member.adapter(folder), [DenoisingState(**state) for state in states]
    with sequence_parallel(member.group("lora")):
        return [state.tensors["latents"] for state in adapter.advance(begun, begun[0].num_steps)]


@pytest.mark.parametrize("variant", families(*VARIANTS, quick=("flux",)))
def test_the_degree_does_not_change_what_loras_do(pool: Pool, model: Model, tmp_path: Path, variant: str) -> None:
    """Requests with different ones share the passes of a group, where the family allows it."""
    folder = Path(shutil.copytree(model(variant), tmp_path / variant))
    for seed, name in enumerate(("style", "other")):
        save_lora(folder, name, random_lora(folder, seed))
    choices = [uses(folder, "style"), (), uses(folder, "other", style=0.5)]
    batch = [make_inputs(variant=variant, loras=loras) for loras in choices]
    states, alone = [start(folder, inputs) for inputs in batch], [final_latents(folder, inputs) for inputs in batch]
    mixes = len({load_stage(folder, Stage.DIFFUSE).batch_key(state) for state in states}) == 1
    for indices in [[0, 1, 2]] if mixes else [[0], [2]]:
        for together in pool.run(denoise, 2, folder, [asdict(states[index]) for index in indices]):
            assert not isinstance(together, Exception), together
            for latents, index in zip(together, indices, strict=True):
                assert (latents - alone[index]).abs().max() < TOLERANCE
    assert (alone[0] - alone[1]).abs().max() > 100 * TOLERANCE
