"""The short measurement of a model that nobody has profiled, by a clock of its own."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler import CostModel, ProfileTable
from profiler.measure.checks import ProfilePoint
from profiler.measure.processes import Processes
from profiler.measure.quick import TimeBudget, measure_quickly
from profiler.measure.sizes import SizeRange
from profiler.measure.stages import Sample, Source
from tridentserve.errors import ProfileError
from tridentserve.models.families import FAMILIES
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

SD3, WAN = FAMILIES["sd3"], FAMILIES["wan"]
RANGE = SizeRange(Shape(64, 64), Shape(512, 512), Shape(512, 512))


class Machine:
    """A machine on which a run of a stage takes what a formula says, and a clock that shows it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slow_s = 0.0
        """Seconds that every run takes in addition, for a while."""
        self.load_s = 0.0
        """Seconds of a load of the weights of a stage."""
        self.no_room: Stage | None = None
        """The stage whose weights the machine does not hold."""
        self.tried: list[tuple[Stage, Shape]] = []

    def clock(self) -> float:
        return self.now_s

    @staticmethod
    def cost(stage: Stage, shape: Shape) -> float:
        n = shape.tokens
        return {Stage.ENCODE: 0.02, Stage.DIFFUSE: 0.01 + 3e-4 * n + 2e-7 * n * n, Stage.DECODE: 8e-4 * n}[stage]

    def sample(self, stage: Stage, source: Source, inputs: GenerationInputs, *others: Any) -> Sample:
        self.now_s += self.load_s if all(known is not stage for known, _ in self.tried) else 0.0
        self.tried.append((stage, inputs.shape))
        if stage is self.no_room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 108.00 MiB.")
        seconds = self.cost(stage, inputs.shape) + self.slow_s
        self.now_s += 5 * seconds
        return Sample(seconds, 0.0, 1000 * inputs.shape.pixels, inputs.shape.pixels)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    for stage in Stage:
        monkeypatch.setattr(
            f"profiler.measure.processes.sample_{stage}",
            lambda *given, stage=stage: machine.sample(stage, *given),
        )
    monkeypatch.setattr("profiler.measure.processes.compute_condition", lambda *given, **named: b"")
    return machine


def measure_on(machine: Machine, cache: Path, budget_s: float) -> ProfileTable:
    source = Source(ensure_tiny("sd3", cache), "cpu")
    return measure_quickly(source, "m", RANGE, (1,), 1, budget_s, clock=machine.clock)


def list_modelled(table: ProfileTable) -> set[tuple[Stage, Shape]]:
    return {(row.stage, row.shape) for row in table.rows if row.source.startswith("modelled")}


def test_sizes_span_what_requests_may_ask_for() -> None:
    sizes = SizeRange(Shape(64, 64), Shape(1024, 1024), Shape(2048, 2048)).choose_sizes(SD3)
    assert [sizes[0], *sizes[-2:]] == [Shape(64, 64), Shape(1024, 1024), Shape(2048, 2048)]
    assert all(1 < high.tokens / low.tokens <= 6 for low, high in pairwise(sizes))
    assert all(shape.height % SD3.size_multiple == 0 for shape in sizes)
    assert SizeRange(*[Shape(64, 64)] * 3).choose_sizes(SD3) == [Shape(64, 64)]


def test_sizes_of_videos_have_frames_that_the_family_makes() -> None:
    sizes = SizeRange(Shape(64, 64), Shape(480, 832, 81), Shape(720, 1280, 129)).choose_sizes(WAN)
    assert Shape(480, 832, 81) in sizes
    assert all(WAN.allows_frames(shape.num_frames) for shape in sizes)
    assert len({shape.num_frames for shape in sizes}) > 3


def test_a_vae_is_measured_at_few_pixels_in_many_frames_too() -> None:
    sizes = SizeRange(Shape(64, 64), Shape(96, 96, 17), Shape(96, 96, 17))
    long = Shape(64, 64, 17)
    assert sizes.choose_vae_sizes(WAN) == [Shape(64, 64), Shape(80, 80, 5), long, Shape(96, 96, 17)]
    assert long not in sizes.choose_sizes(WAN)
    assert RANGE.choose_vae_sizes(SD3) == RANGE.choose_sizes(SD3)


@pytest.mark.parametrize("budget_s", [1000.0, 8.0])
def test_videos_of_other_sizes_are_predicted(machine: Machine, tiny_cache: Path, budget_s: float) -> None:
    """A VAE works on every frame, the transformer on one in four."""
    machine.cost = cost_video  # type: ignore[method-assign]
    source = Source(ensure_tiny("wan", tiny_cache), "cpu")
    sizes = SizeRange(Shape(64, 64), Shape(96, 96, 17), Shape(128, 128, 33))
    table = measure_quickly(source, "m", sizes, (1,), 1, budget_s, clock=machine.clock)
    assert bool(list_modelled(table)) == (budget_s < 1000)
    assert {row.stage for row in table.rows if row.shape == Shape(64, 64, 33)} == {Stage.DECODE}
    times = CostModel([table], "cpu")
    for stage in (Stage.DIFFUSE, Stage.DECODE):
        for shape in (Shape(80, 80, 17), Shape(96, 64, 9), Shape(112, 112, 25), Shape(128, 96, 5), Shape(96, 96)):
            assert times.seconds("m", stage, shape) == pytest.approx(cost_video(stage, shape), rel=0.2)


def cost_video(stage: Stage, shape: Shape) -> float:
    if stage is Stage.DECODE:
        return 0.005 + 1e-3 * shape.pixels / 256 * shape.num_frames
    return {Stage.ENCODE: 0.02, Stage.DIFFUSE: 0.01 + 3e-4 * shape.tokens}[stage]


def test_no_size_is_larger_than_the_table_of_positions() -> None:
    sizes = SizeRange(Shape(64, 64), Shape(1024, 1024), Shape(2048, 2048)).cap_sides(SD3, 512).choose_sizes(SD3)
    assert sizes[-1] == Shape(512, 512)


def test_with_enough_time_all_sizes_are_measured_and_others_predicted(machine: Machine, tiny_cache: Path) -> None:
    table = measure_on(machine, tiny_cache, budget_s=1000)
    assert not list_modelled(table)
    times = CostModel([table], "cpu")
    for stage in Stage:
        for shape in (Shape(96, 96), Shape(192, 192), Shape(160, 256), Shape(448, 448)):
            assert times.seconds("m", stage, shape) == pytest.approx(machine.cost(stage, shape), rel=0.15)


def test_with_little_time_large_sizes_are_modelled(machine: Machine, tiny_cache: Path) -> None:
    """Each stage is measured at two sizes, whatever they take, and the time is not exceeded by more."""
    table = measure_on(machine, tiny_cache, budget_s=2)
    modelled = list_modelled(table)
    assert {stage for stage, _ in modelled} >= {Stage.DIFFUSE, Stage.DECODE}
    assert machine.now_s < 4
    times = CostModel([table], "cpu")
    for stage, shape in modelled:
        assert times.seconds("m", stage, shape) == pytest.approx(machine.cost(stage, shape), rel=0.5)
    nothing = measure_on(machine, tiny_cache, budget_s=1e-9)
    assert len(nothing.rows) - len(list_modelled(nothing)) == 2 * len(Stage)


def test_the_loads_of_weights_take_no_time_from_the_sizes(machine: Machine, tiny_cache: Path) -> None:
    quick = measure_on(machine, tiny_cache, budget_s=8)
    machine.tried, machine.load_s = [], 30.0
    slow = measure_on(machine, tiny_cache, budget_s=8)
    assert list_modelled(slow) == list_modelled(quick)
    assert len(list_modelled(quick)) < len(quick.rows) - 2 * len(Stage)


def test_the_usual_size_is_measured_where_smaller_ones_have_used_the_time(machine: Machine, tiny_cache: Path) -> None:
    usual = Shape(512, 512)
    sizes = SizeRange(Shape(64, 64), usual, Shape(1024, 1024))
    source = Source(ensure_tiny("sd3", tiny_cache), "cpu")
    table = measure_quickly(source, "m", sizes, (1,), 1, 8.0, clock=machine.clock)
    assert (Stage.DIFFUSE, Shape(1024, 1024)) in list_modelled(table)
    assert (Stage.DIFFUSE, usual) not in list_modelled(table)


@pytest.mark.parametrize("stage", [Stage.DIFFUSE, Stage.DECODE])
def test_a_stage_for_which_there_is_no_room_ends_the_measurement(
    machine: Machine, tiny_cache: Path, stage: Stage
) -> None:
    machine.no_room = stage
    with pytest.raises(ProfileError, match=rf"stage {stage} of m: out of memory .*models\[\].dtype"):
        measure_on(machine, tiny_cache, budget_s=1000)
    assert [tried for tried, _ in machine.tried].count(stage) == 1  # each try loads the weights


def test_a_slow_moment_is_forgotten_in_a_later_pass(machine: Machine, tiny_cache: Path) -> None:
    heard: list[ProfilePoint] = []

    def hear(point: ProfilePoint, sample: Sample) -> None:
        heard.append(point)
        machine.slow_s = 0.0

    machine.slow_s = 5.0  # until the first point is heard of
    source = Source(ensure_tiny("sd3", tiny_cache), "cpu")
    table = measure_quickly(source, "m", RANGE, (1,), 1, 1000, hear, machine.clock)
    first = ProfilePoint(Stage.ENCODE, Shape(64, 64))
    assert heard[0] == first
    assert heard.count(first) > 1
    assert {row.seconds for row in table.rows if row.stage is Stage.ENCODE} == {machine.cost(Stage.ENCODE, RANGE.usual)}


def test_encode_of_a_prompt_takes_as_long_at_every_size(machine: Machine, tiny_cache: Path) -> None:
    """A slow moment at one size is none of the size."""
    machine.slow_s, source = 0.1, Source(ensure_tiny("sd3", tiny_cache), "cpu")

    def hear(point: ProfilePoint, sample: Sample) -> None:
        machine.slow_s = 0.1 if point.shape == RANGE.smallest else 0.0

    table = measure_quickly(source, "m", RANGE, (1,), 1, 1000, hear, machine.clock)
    (seconds,) = {row.seconds for row in table.rows if row.stage is Stage.ENCODE}
    assert seconds == machine.cost(Stage.ENCODE, RANGE.usual)
    assert len({row.seconds for row in table.rows if row.stage is Stage.DIFFUSE}) > 1


def test_a_model_whose_wide_steps_fail_has_degree_1(
    machine: Machine, tiny_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Processes._run_together

    def run(self: Processes, sample: Any, point: ProfilePoint, *given: Any) -> Sample:
        if point.degree > 1:
            raise RuntimeError("no group here")
        return whole(self, sample, point, *given)

    monkeypatch.setattr(Processes, "_run_together", run)
    monkeypatch.setattr(Processes, "_free_ranks", lambda self: None)
    source = Source(ensure_tiny("sd3", tiny_cache), "cpu")
    table = measure_quickly(source, "m", RANGE, (1, 2), 1, 1000, clock=machine.clock)
    assert {row.degree for row in table.rows} == {1}
    assert "m is served at degree 1 only: degree 2 failed: no group here" in caplog.text


def test_later_passes_go_by_what_a_point_took(machine: Machine) -> None:
    budget = TimeBudget(10.0, machine.clock)
    small = ProfilePoint(Stage.DIFFUSE, Shape(64, 64))
    assert budget.admit(small) is None
    machine.now_s = 4.0  # with a load of weights
    budget.note(small, Sample(0.1, 0.0, 0, 0))
    assert budget.admit(small) is None
    machine.now_s = 10.5  # the load, of 3.5 s, is not counted
    assert budget.admit(small) == "it would take about 4 s, and 3 s are left"
    assert budget.left_s == 3.0
