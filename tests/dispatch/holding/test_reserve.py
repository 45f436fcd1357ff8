"""Workers that are kept free for short requests: where that is, how many, and what they may do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dispatch import DispatchOptions, IlpDispatcher
from dispatch.candidates.arrivals import RecentArrivals
from dispatch.candidates.survey import TickView
from dispatch.holding.reserve import ReservedTick, Reserver
from tests.dispatch.cluster import decide, request, worker, workers
from tests.profiler.synthetic import EDC_BYTES
from tests.scheduling.fakes import FakeTimes
from tridentserve.plans import Replica
from tridentserve.protocols import PendingRequest, WorkerView
from tridentserve.requests import Shape
from tridentserve.stages import Stage

SHORT, MIDDLE, HUGE = Shape(256, 256), Shape(1024, 1024), Shape(2048, 2048)
RUN_S = 0.4
"""Seconds of a short request: four steps, E and C take no time."""
STEP_S = 40.0
"""Seconds of a step of a huge one."""
NOW_S = 10.0
OPTIONS = DispatchOptions(max_degree=1, time_limit_s=30.0)


class Times(FakeTimes):
    """Huge steps, which nothing stops; `decode_s` is the time of C of a huge request."""

    def __init__(self, step_s: float = STEP_S, decode_s: float = 0.0, unit: int = 1) -> None:
        super().__init__()
        self._step_s, self._decode_s, self._unit = step_s, decode_s, unit

    def seconds(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> float:
        if stage is Stage.DIFFUSE:
            return (self._step_s if shape == HUGE else RUN_S / 4) / degree
        return self._decode_s if (stage, shape) == (Stage.DECODE, HUGE) else 0.0

    def unit(self, model: str, stage: Stage) -> int:
        return self._unit


def short(name: str, arrival_s: float = NOW_S, slack_s: float = 1.0, model: str = "one") -> PendingRequest:
    return request(name, SHORT, RUN_S + slack_s, steps=4, arrival_s=arrival_s, model=model)


def huge(number: int, arrival_s: float = 0.5, steps: int = 4, model: str = "one") -> list[PendingRequest]:
    return [request(f"huge {i}", HUGE, 10_000.0, steps=steps, arrival_s=arrival_s, model=model) for i in range(number)]


def past(slack_s: float = 1.0, number: int = 12) -> list[PendingRequest]:
    """Short requests, spread over the time until now, that came among some huge ones."""
    return [*(short(f"past {i}", NOW_S * i / number, slack_s) for i in range(number)), *huge(8)]


class Known:
    """What a dispatcher remembers of arrivals."""

    def __init__(self) -> None:
        self.arrivals = RecentArrivals(OPTIONS)
        self.reserver = Reserver(self.arrivals)


def reserve(
    arrivals: Sequence[PendingRequest],
    views: Sequence[WorkerView],
    times: Times | None = None,
    now_s: float = NOW_S,
    known: Known | None = None,
    options: DispatchOptions = OPTIONS,
) -> ReservedTick | None:
    known = known or Known()
    known.arrivals.note(arrivals)
    tick = TickView(times or Times(), options, views, now_s)
    return known.reserver.keep(tick.snapshot, tick, arrivals, OPTIONS.segment_s)


def kept(tick: ReservedTick | None) -> list[str]:
    """The ids of the workers that are kept."""
    return [view.worker_id for pool in tick.kept for node in pool.nodes for view in node] if tick is not None else []


def test_workers_are_kept_where_huge_steps_meet_short_requests() -> None:
    """Twelve in 10 s, of 0.4 s each, keep half a worker busy; with something for bursts that is two."""
    tick = reserve(past(), workers(8, "EDC"))
    assert tick is not None
    assert kept(tick) == ["n0-w6", "n0-w7"], "the last of the node: aligned blocks stay whole"
    assert [view.worker_id for view in tick.snapshot.workers if not view.idle] == ["n0-w6", "n0-w7"]


def test_more_is_kept_for_more_short_requests() -> None:
    assert len(kept(reserve(past(number=60), workers(8, "EDC")))) == 4


def test_nothing_is_kept_with_few_arrivals() -> None:
    few = past()[:9]
    assert reserve([*few[:5], *huge(4)], workers(8, "EDC")) is None
    assert reserve([*few[:6], *huge(4)], workers(8, "EDC")) is not None


def test_requests_that_wait_for_many_ticks_have_arrived_once() -> None:
    known, arrivals = Known(), [short("s", 1.0), *huge(8)]
    for _ in range(5):
        known.arrivals.note(arrivals)
    assert reserve([], workers(8, "EDC"), known=known) is None


def test_nothing_is_kept_where_some_worker_is_soon_free_anyway() -> None:
    """Many workers, short steps, or requests that can wait for longer than a huge step takes."""
    assert reserve(past(), workers(64, "EDC")) is None
    assert reserve(past(), workers(8, "EDC"), Times(step_s=0.5)) is None
    assert reserve(past(slack_s=20.0), workers(8, "EDC")) is None


def test_a_long_c_counts_like_a_long_step() -> None:
    assert reserve(past(), workers(8, "EDC"), Times(step_s=0.5, decode_s=40.0)) is not None


def test_requests_that_could_not_be_in_time_anyway_are_not_waited_for() -> None:
    assert reserve(past(slack_s=-0.1), workers(8, "EDC")) is None


def test_a_long_request_that_a_wider_degree_leaves_time_is_not_short() -> None:
    """Alone on one worker it would have a second to spare, on two more than half a step."""
    long = [request(f"long {i}", HUGE, STEP_S + 1.0, steps=1, arrival_s=NOW_S * i / 12) for i in range(12)]
    views, wide = workers(8, "EDC"), replace(OPTIONS, max_degree=2)
    assert kept(reserve(long, views)) != []
    assert kept(reserve(long, views, options=wide)) == []


def test_a_node_is_left_for_what_needs_its_optimal_degree() -> None:
    """Two nodes of two: a hopeless request runs on two workers of one node or not at all."""
    views, wide = [*workers(2, "EDC"), *workers(2, "EDC", node="n1")], replace(OPTIONS, max_degree=2)
    many = past(number=60)
    assert len(kept(reserve(many, views))) == 3
    assert kept(reserve(many, views, options=wide)) == ["n0-w0", "n0-w1"]


@pytest.mark.parametrize(("wide", "number"), [(8, 1), (11, 1), (12, 0), (20, 0)])
def test_nothing_is_kept_where_that_would_make_more_late_than_it_saves(wide: int, number: int) -> None:
    """Four steps of 40 s: only both workers of the only node end them within 85 s. Twelve requests are short."""
    pressed = [request(f"wide {i}", HUGE, 85.0, steps=4, arrival_s=0.5) for i in range(wide)]
    tick = reserve([*past(), *pressed], workers(2, "EDC"), options=DispatchOptions(time_limit_s=30.0))
    assert len(kept(tick)) == number


def test_workers_are_kept_where_other_nodes_have_room_for_what_needs_a_whole_one() -> None:
    pressed = [request(f"wide {i}", HUGE, 85.0, steps=4, arrival_s=0.5) for i in range(20)]
    views = [*workers(2, "EDC"), *workers(2, "EDC", node="n1")]
    assert kept(reserve([*past(), *pressed], views, options=DispatchOptions(time_limit_s=30.0)))


def test_units_of_several_workers_are_not_kept() -> None:
    views = [replace(view, place=i) for i, view in enumerate(workers(8, "EDC"))]
    wide = replace(OPTIONS, max_degree=2)
    assert len(kept(reserve(past(), views, Times(unit=1), options=wide))) == 2
    assert kept(reserve(past(), views, Times(unit=2), options=wide)) == []


def test_one_worker_is_always_left() -> None:
    assert len(kept(reserve(past(number=60), workers(2, "EDC")))) == 1
    assert kept(reserve(past(), workers(1, "EDC"))) == []


def test_a_worker_that_is_free_soon_is_as_good_as_one_that_is_kept() -> None:
    def with_busy(free_at_s: float) -> list[str]:
        return kept(reserve(past(), [*workers(7, "EDC"), worker("busy", "EDC", free_at_s=free_at_s)]))

    assert len(with_busy(NOW_S + 0.9)) == 1
    assert len(with_busy(NOW_S + 1.1)) == 2


def test_the_workers_that_have_the_weights_are_kept_first() -> None:
    views = workers(8, "EDC")
    views = [views[0], *(replace(view, resident=frozenset()) for view in views[1:])]
    assert kept(reserve(past(), views)) == ["n0-w0", "n0-w7"]


def test_what_is_expected_is_found_anew_every_few_seconds() -> None:
    known = Known()
    assert len(kept(reserve(past(), workers(8, "EDC"), known=known))) == 2
    more = [short(f"more {i}", NOW_S + i / 100) for i in range(100)]
    assert len(kept(reserve(more, workers(8, "EDC"), now_s=NOW_S + 2, known=known))) == 2
    assert len(kept(reserve([], workers(8, "EDC"), now_s=NOW_S + 6, known=known))) > 2


def test_other_pools_are_looked_at_at_once() -> None:
    """After a new placement, or where workers are lost."""
    known = Known()
    assert len(kept(reserve(past(), workers(8, "EDC"), known=known))) == 2
    assert len(kept(reserve([], workers(2, "EDC"), known=known))) == 1


class Wide(Times):
    """A middle size has room on two workers only."""

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        return EDC_BYTES * 3 // 2 // degree if (stage, shape) == (Stage.DIFFUSE, MIDDLE) else 1


@pytest.mark.parametrize("number", [10, 250])
def test_no_request_waits_for_workers_that_are_kept_for_ever(number: int) -> None:
    """However many have come since."""
    dispatcher, views = IlpDispatcher(Wide(), replace(OPTIONS, max_degree=2)), workers(2, "EDC")
    wide = request("wide", MIDDLE, 1.0)
    for now_s in (20.0, 30.0):
        came = [wide, *past(number=number), *huge(8, arrival_s=now_s - 5.0)]
        assert decide(dispatcher, came, [busy(view) for view in views], now_s) == []
    (assignment,) = decide(dispatcher, [wide], views, 1000.0)
    assert len(assignment.diffuse) == 2


# The dispatcher as a whole.


def served(
    pending: Sequence[PendingRequest], views: Sequence[WorkerView], options: DispatchOptions = OPTIONS
) -> dict[str, str]:
    """The worker of each request that runs, after the past that makes workers be kept."""
    dispatcher = IlpDispatcher(Times(), options)
    busy = [replace(view, idle=False, free_at_s=NOW_S) for view in views]
    assert decide(dispatcher, past(), busy, NOW_S) == []
    return {entry.request_ids[0]: entry.diffuse[0] for entry in decide(dispatcher, pending, views, NOW_S)}


def test_kept_workers_have_no_long_work() -> None:
    assert set(served(huge(8), workers(8, "EDC")).values()) == {f"n0-w{i}" for i in range(6)}


def test_kept_workers_have_short_work() -> None:
    found = served([*huge(8), short("urgent"), short("another")], workers(8, "EDC"))
    assert {"urgent", "another"} < set(found)
    assert len(found) == 8
    alone = [view if view.worker_id in ("n0-w6", "n0-w7") else busy(view) for view in workers(8, "EDC")]
    assert served(huge(8), alone) == {}
    assert set(served([*huge(8), short("urgent")], alone)) == {"urgent"}


def busy(view: WorkerView) -> WorkerView:
    return replace(view, idle=False, free_at_s=NOW_S + 1000.0)


def test_long_work_in_short_steps_may_have_them() -> None:
    """A segment of a second holds a worker for no longer than the short requests can wait."""
    views = workers(8, "EDC")
    long = [request(f"long {i}", SHORT, 1000.0, steps=100) for i in range(8)]
    assert len(served(long, views)) == 8
    in_one = replace(OPTIONS, segment_s=1e9, least_segment_s=1e9)
    assert len(served(long, views, in_one)) == 6


def test_keeping_workers_free_can_be_turned_off() -> None:
    assert len(served(huge(8), workers(8, "EDC"), replace(OPTIONS, keep_free=False))) == 8


@pytest.mark.parametrize(("is_resident", "expected"), [(True, {"urgent"}), (False, set())])
def test_another_model_may_have_them_only_where_its_weights_are_in_memory_too(
    is_resident: bool, expected: set[str]
) -> None:
    """To bring them would take the place of those that the short requests need."""
    here = None if is_resident else frozenset(Replica("one", stage) for stage in Stage)
    views = [replace(view, resident=here) for view in workers(8, "one:EDC", "two:EDC")]
    few = [view if view.worker_id in ("n0-w6", "n0-w7") else busy(view) for view in views]
    urgent = request("urgent", SHORT, 30.0, steps=4, arrival_s=NOW_S, model="two")
    assert set(served([urgent], few)) == expected
    assert set(served([urgent], few, replace(OPTIONS, keep_free=False))) == {"urgent"}
    same_model = request("urgent", SHORT, 30.0, steps=4, arrival_s=NOW_S)
    assert set(served([same_model], few)) == {"urgent"}
