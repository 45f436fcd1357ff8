"""The profile of a pipeline that is served whole: all of its time and memory is D's."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler import CostModel
from profiler.measure.checks import Sweep
from profiler.measure.run import MeasureOptions, measure
from profiler.measure.stages import Source
from tests.pipelines.whole_models import whole_folder
from tridentserve.errors import ProfileError
from tridentserve.requests import Shape
from tridentserve.stages import Stage

SHAPE = Shape(64, 64)


@pytest.mark.families
def test_d_has_all_time_and_memory(tmp_path: Path) -> None:
    source = Source(whole_folder("stable_diffusion", tmp_path), "cpu")
    table = measure(source, "sd", Sweep((SHAPE,), batches=(1, 2)), MeasureOptions(repeats=1, num_threads=1))
    times = CostModel([table], "cpu")
    seconds = {stage: times.seconds("sd", stage, SHAPE) for stage in Stage}
    assert seconds[Stage.DIFFUSE] > 10 * max(seconds[Stage.ENCODE], seconds[Stage.DECODE]) > 0
    held = {stage: times.weights_bytes("sd", stage) for stage in Stage}
    assert (held[Stage.ENCODE], held[Stage.DECODE]) == (0, 0)
    assert held[Stage.DIFFUSE] > 1_000_000
    assert times.peak_bytes("sd", Stage.DIFFUSE, SHAPE, 1, 2) > times.peak_bytes("sd", Stage.DIFFUSE, SHAPE) > 100_000
    assert times.output_bytes("sd", Stage.DIFFUSE, SHAPE) == SHAPE.pixels * 3
    with pytest.raises(ProfileError, match="is served whole, on one worker"):
        measure(source, "sd", Sweep((SHAPE,), degrees=(1, 2)), MeasureOptions())
