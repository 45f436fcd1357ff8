"""What memory allows: all stages at once, E and C as plans of their own, C in tiles, wider degrees, other workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dispatch import DispatchOptions, IlpDispatcher
from dispatch.candidates.survey import TickView
from dispatch.candidates.work import Work
from tests.dispatch.cluster import decide, request, worker, workers
from tests.engine.simulated.scenario import Watched
from tests.profiler.synthetic import MIB, SHAPES, cost_model
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated import SimulatedEngine, SimulationOptions, SimulationResult
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.protocols import Assignment
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.estimation.plan_estimates import frugal_decode_bytes
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.stages import Stage
from tridentserve.testing import find_violations

# At 1024x1024, weights and activations in MiB: E 400 and 50, D 800 and 391 / k, C 100 and 1536, or 408 in tiles.
LARGE = SHAPES[2]
TIMES = cost_model()
DISPATCHER = IlpDispatcher(TIMES, DispatchOptions(segment_s=1e9))
SPEC = request("r", LARGE).spec
E, D, C = Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE


def assign(memory_mib: int, number: int = 1, steps_done: int = 0) -> Assignment:
    """On so many EDC workers with this memory."""
    views = workers(number, "EDC", memory_bytes=memory_mib * MIB)
    (assignment,) = decide(DISPATCHER, [request("r", LARGE, steps_done=steps_done)], views, 0.0)
    return assignment


def test_stages_run_apart_where_there_is_no_room_for_all() -> None:
    """ED needs 1591 MiB, C 1636."""
    assert frugal_decode_bytes(TIMES, "one", LARGE) == 408 * MIB
    assert [assign(memory_mib).apart for memory_mib in (1300 + 1536, 1300 + 1535, 1636)] == [set(), {C}, {C}]
    found = assign(1636)
    assert found.encode == found.diffuse == found.decode == ("n0-w0",)


@pytest.mark.parametrize(
    ("memory_mib", "in_tiles", "apart"),
    [
        (1636, False, {C}),
        (1635, True, {C}),
        (1591, True, {C}),
        (1590, True, {E}),
        (1308, True, {E}),
        (1307, True, {C, E}),
    ],
)
def test_tiles_are_for_where_c_does_not_fit_by_itself(memory_mib: int, in_tiles: bool, apart: set[Stage]) -> None:
    """In tiles, C needs 508 MiB, with D 1308."""
    tick = TickView(TIMES, DispatchOptions(), workers(1, "EDC", memory_bytes=memory_mib * MIB), 0.0)
    (candidate,) = tick.survey(Work.from_spec(SPEC)).candidates
    assert candidate.in_tiles == in_tiles
    assert candidate.apart == apart
    assert assign(memory_mib).apart == apart


def test_a_request_that_has_its_condition_needs_no_room_for_e() -> None:
    assert assign(1636, steps_done=5).apart == {C}
    assert assign(2436, steps_done=5).apart == set()
    assert assign(2435).apart == {C}


def test_each_degree_has_its_own_stages_apart() -> None:
    """E and D at once need 1591 MiB at degree 1, and 1298 at degree 4."""
    views = workers(4, "EDC", memory_bytes=1500 * MIB)
    narrow = IlpDispatcher(TIMES, DispatchOptions(max_degree=1, segment_s=1e9))
    (alone,) = decide(narrow, [request("r", LARGE)], views, 0.0)
    assert len(alone.diffuse) == 1
    assert alone.apart == {E}
    wide = assign(1500, 4)
    assert len(wide.diffuse) == 4
    assert wide.apart == {C}


def test_what_fits_in_no_way_at_all_is_said() -> None:
    """D alone needs 800 and 391 MiB on one worker."""
    views = workers(1, "EDC", memory_bytes=1190 * MIB)
    assert decide(DISPATCHER, [request("r", LARGE)], views, 0.0) == []
    why = str(DISPATCHER.can_ever_run(SPEC, views))
    assert why.startswith(f"one cannot make 1024x1024 here: EDC workers have {1190 * MIB} bytes beside the handoff")
    assert DISPATCHER.can_ever_run(SPEC, workers(1, "EDC", memory_bytes=1191 * MIB)) is None


def test_the_reserve_for_the_handoff_is_not_given_away() -> None:
    reserved = IlpDispatcher(
        TIMES, DispatchOptions(handoff_reserve_bytes=DispatchOptions().handoff_reserve_bytes + MIB)
    )
    assert reserved.can_ever_run(SPEC, workers(1, "EDC", memory_bytes=1192 * MIB)) is None
    assert reserved.can_ever_run(SPEC, workers(1, "EDC", memory_bytes=1191 * MIB)) is not None


def test_memory_decides_the_degree_where_d_is_alone() -> None:
    """800 + 196 MiB at degree 2 fits, 800 + 391 at degree 1 does not."""
    pair = [*workers(2, "D", memory_bytes=1100 * MIB), worker("e", "E"), worker("c", "C")]
    (assignment,) = decide(DISPATCHER, [request("r", LARGE)], pair, 0.0)
    assert len(assignment.diffuse) == 2
    assert assignment.apart == set()
    assert DISPATCHER.can_ever_run(SPEC, pair[1:]) is not None
    small_c = [*pair[:3], worker("c", "C", memory_bytes=508 * MIB - 1)]
    assert "no auxiliary has the memory for decode" in str(DISPATCHER.can_ever_run(SPEC, small_c))


# From end to end: what is apart leaves the memory, and comes back.


def simulate(memory_mib: int, segment_s: float = 1e9) -> tuple[SimulationResult, list[tuple[str, str]]]:
    """Two requests, a long time apart, on one worker; and for each load the stages that came and that left."""
    reserve_bytes = DispatchOptions().handoff_reserve_bytes
    specs = [WorkerSpec("a", "n0", memory_mib * MIB + reserve_bytes, "gpu")]
    placement = PlacementPlan({"a": frozenset(Replica("one", stage) for stage in Stage)})
    dispatcher = IlpDispatcher(TIMES, DispatchOptions(segment_s=segment_s))
    scheduler = Watched(Scheduler(specs, placement, TIMES, dispatcher))
    options = SimulationOptions(handoff_capacity_bytes=reserve_bytes, group_bytes=0, keep_plans=True)
    engine = SimulatedEngine(scheduler, specs, placement, TIMES, options)
    result = engine.run([(100.0 * i, replace(SPEC, request_id=f"r{i}")) for i in range(2)])
    assert find_violations(result, specs) == []
    loads = [
        (event.loaded.stage.letter, "".join(sorted(replica.stage.letter for replica in event.evicted)))
        for event in scheduler.events
        if isinstance(event, ev.ReplicaLoaded)
    ]
    return result, loads


def stages_of(result: SimulationResult) -> list[str]:
    return ["".join(span.stage.letter for span in plan.spans) for plan in result.plans]


def test_where_all_stages_have_room_at_once_nothing_moves() -> None:
    result, loads = simulate(3000)
    assert (result.outcomes, stages_of(result), loads) == ({"finished": 2}, ["EDC", "EDC"], [])


@pytest.mark.parametrize(("segment_s", "plans"), [(1e9, ["ED", "C"]), (1.0, ["ED", "D", "C"])])
def test_weights_that_are_in_the_way_of_c_leave_and_come_back(segment_s: float, plans: list[str]) -> None:
    """C needs 1636 MiB: with D's weights, which are 800, it has no room in 2000."""
    result, loads = simulate(2000, segment_s)
    assert result.outcomes == {"finished": 2}
    assert result.counts.out_of_memory == 0
    assert stages_of(result) == plans * 2
    assert all(plan.workers == ("a",) for plan in result.plans)
    assert any("D" in left for _, left in loads), "for C"
    assert "D" in [stage for stage, _ in loads], "for the second request"
