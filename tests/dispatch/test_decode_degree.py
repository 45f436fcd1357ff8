"""On how many of D's workers C runs, and what happens where a worker has not the memory for all of an image."""

from __future__ import annotations

import pytest

from dispatch.dispatcher import IlpDispatcher
from dispatch.options import DispatchOptions
from tests.scheduling.fakes import FakeTimes
from tridentserve.plans import Replica
from tridentserve.protocols import ClusterView, PendingRequest, WorkerView
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import Stage

MODEL = "m"
LARGE = Shape(2048, 2048)


class Times(FakeTimes):
    """C on two workers takes `half` of the time of one."""

    def __init__(self, half: float) -> None:
        super().__init__()
        self.half = half

    def seconds(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> float:
        alone_s = super().seconds(model, stage, shape, degree, batch)
        return alone_s * self.half if (stage, degree) == (Stage.DECODE, 2) else alone_s

    def optimal_degree(self, model: str, stage: Stage, shape: Shape) -> int:
        return 2 if self.seconds(model, stage, shape) / (2 * self.seconds(model, stage, shape, 2)) > 0.8 else 1


def view(name: str, stages: str, memory_bytes: int = 10**9) -> WorkerView:
    held = frozenset(Replica(MODEL, stage) for stage in Stage if stage.letter in stages)
    return WorkerView(name, "n", memory_bytes, held, idle=True, free_at_s=0.0)


def decide(times: Times, *workers: WorkerView) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The workers of D and of C; None where nothing can run."""
    dispatcher = IlpDispatcher(times, DispatchOptions(handoff_reserve_bytes=0, segment_s=1e9))
    spec = RequestSpec("r", MODEL, LARGE, 4)
    if dispatcher.can_ever_run(spec, workers) is not None:
        return None
    pending = PendingRequest(spec, 0.0, 100.0)
    (assignment,) = dispatcher.decide(ClusterView(0.0, [pending], [], workers)).assignments
    return assignment.diffuse, assignment.decode


@pytest.mark.parametrize(("half", "decode"), [(0.5, ("a", "b")), (0.6, ("a", "b")), (0.7, ("a",))])
def test_c_follows_on_as_many_workers_as_pay(half: float, decode: tuple[str, ...]) -> None:
    """The efficiency of two is 1, 0.83 and 0.71."""
    assert decide(Times(half), view("a", "EDC"), view("b", "EDC")) == (("a", "b"), decode)


class Heavy(Times):
    """Decoding takes 100 bytes per pixel: a quarter of that in tiles, for their pixels."""

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        return 100 * shape.pixels if stage is Stage.DECODE else 1


ENOUGH_FOR_TILES = 50 * LARGE.pixels


def test_tiles_are_for_where_nothing_else_fits() -> None:
    assert decide(Heavy(0.7), view("a", "EDC", ENOUGH_FOR_TILES)) == (("a",), ("a",))
    assert decide(Heavy(0.7), view("a", "EDC", ENOUGH_FOR_TILES), view("b", "EDC")) == (("b",), ("b",))
    primary = view("a", "ED")
    assert decide(Heavy(0.7), primary, view("b", "C", ENOUGH_FOR_TILES)) == (("a",), ("b",))
    assert decide(Heavy(0.7), primary, view("b", "C", ENOUGH_FOR_TILES), view("c", "C")) == (("a",), ("c",))
    assert decide(Heavy(0.7), primary, view("b", "C", 1000)) is None
