"""Plans do the steps that were asked for: what would take others is refused, and not decoded half done."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.engine.live.previews.test_previews import HeldStages
from tests.pipelines.models import make_inputs, model_folder
from tridentserve.device import find_device
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.worker.denoising import StepControl
from tridentserve.engine.live.worker.executor import StageExecutor
from tridentserve.errors import InvalidRequestError
from tridentserve.plans import DispatchPlan, PlanMember
from tridentserve.stages import Stage


def test_a_scheduler_that_makes_other_steps_is_refused(tmp_path: Path) -> None:
    folder = model_folder("sdxl-trailing", tmp_path)
    executor = StageExecutor("w", cast(Any, HeldStages(folder)), cast(Any, None), find_device("cpu"))

    def execute(steps: int) -> dict[str, Parcel]:
        plan = DispatchPlan(0, "m", (Stage.ENCODE, Stage.DIFFUSE), ("w",), (PlanMember("r", (0, steps)),))
        inputs = {"r": make_inputs(16, 16, steps, variant="sdxl")}
        return executor.execute_plan(plan, inputs, {}, StepControl()).outputs

    assert set(execute(2)["r"].tensors) == {"latents"}
    # With this spacing, diffusers rounds 1000 / 61 so that there are 62.
    with pytest.raises(InvalidRequestError, match="makes 62 steps of 61; ask for another number"):
        execute(61)
