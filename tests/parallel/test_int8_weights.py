"""Workers that denoise together with int8 weights make what one makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from tests.parallel.members import Member, Pool
from tests.pipelines.models import PARALLEL, families, make_inputs, start
from tridentserve.parallel import sequence_parallel
from tridentserve.pipelines import DenoisingState, PipelineAdapter, load_adapter
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.int8_weights import quantize
from tridentserve.stages import Stage

TOLERANCE = 1e-4


def load(folder: Path) -> PipelineAdapter:
    """With all but the weights in float32, in which the order of additions hardly shows."""
    adapter = load_adapter(folder, frozenset({Stage.DIFFUSE}))
    quantize(cast(DiffusersAdapter, adapter).pipe.transformer)
    return adapter


def denoise(member: Member, folder: Path, state: dict[str, Any]) -> Any:
    with sequence_parallel(member.group("int8")):
        return load(folder).step(DenoisingState(**state), 2).tensors["latents"]


@pytest.mark.parametrize("variant", families(*PARALLEL, quick=()))
def test_the_degree_does_not_change_the_result(pool: Pool, model: Callable[[str], Path], variant: str) -> None:
    folder = model(variant)
    state = start(folder, make_inputs(variant=variant))
    alone = load(folder).step(state, 2).tensors["latents"]
    for latents in pool.run(denoise, 2, folder, asdict(state)):
        assert not isinstance(latents, Exception), latents
        assert (latents - alone).abs().max() < TOLERANCE
