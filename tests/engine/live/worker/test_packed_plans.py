"""Members of a plan that differ in size share their denoising steps as one packed sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.engine.live.previews.test_previews import HeldStages
from tests.pipelines.models import make_inputs
from tridentserve.device import find_device
from tridentserve.engine.live.worker.denoising import StepControl
from tridentserve.engine.live.worker.executor import Execution, StageExecutor
from tridentserve.pipelines import DenoisingState
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.plans import DispatchPlan, PlanMember
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

STAGES = (Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE)
GUIDED, UNGUIDED = 5.0, 1.0


def execute(executor: StageExecutor, inputs: Mapping[str, GenerationInputs]) -> Execution:
    plan = DispatchPlan(1, "m", STAGES, ("w",), tuple(PlanMember(name, (0, 2)) for name in inputs))
    return executor.execute_plan(plan, inputs, {}, StepControl())


@pytest.mark.parametrize(("sizes", "calls"), [(((64, 64), (64, 64)), [1, 1, 1, 1]), (((64, 96), (32, 32)), [2, 2])])
def test_members_of_other_sizes_and_guidance_are_denoised_in_one_call(
    tiny_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[tuple[int, int], tuple[int, int]],
    calls: list[int],
) -> None:
    """Those of one size that differ in guidance are not: their plan has the memory of a batch."""
    executor = StageExecutor(
        "w", cast(Any, HeldStages(ensure_tiny("sd3", tiny_cache))), cast(Any, None), find_device("cpu")
    )
    one, other = sizes
    inputs = {
        "one": make_inputs(*one, steps=2, guidance_scale=GUIDED),
        "other": make_inputs(*other, steps=2, guidance_scale=UNGUIDED),
    }
    stock, called = DiffusersAdapter.advance, []

    def advance(self: DiffusersAdapter, states: Sequence[DenoisingState], n: int = 1) -> list[DenoisingState]:
        called.append(len(states))
        return stock(self, states, n)

    monkeypatch.setattr(DiffusersAdapter, "advance", advance)

    images = execute(executor, inputs).decoded

    assert called == calls
    for name, content in inputs.items():
        alone = execute(executor, {name: content}).decoded[name].pixels
        assert images[name].pixels.shape == alone.shape
        assert np.abs(images[name].pixels.astype(int) - alone.astype(int)).max() <= 1
