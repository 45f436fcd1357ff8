"""The dispatcher as a whole: types, degrees, auxiliaries, memory, deadlines, and the reasons it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dispatch import DispatchOptions, IlpDispatcher
from profiler import CostModel
from profiler.memory import compute_stages_peak_bytes, sum_weights_bytes
from tests.dispatch.cluster import decide, request, worker, workers
from tests.profiler.synthetic import EDC_BYTES, SHAPES, cost_model, step_seconds, wide_only_table
from tridentserve.plans import Replica
from tridentserve.protocols import Dispatcher, PendingRequest, WorkerView
from tridentserve.requests import Shape
from tridentserve.stages import PlacementType, Stage

SMALL, MIDDLE, LARGE = SHAPES[0], SHAPES[1], SHAPES[2]
TIMES = cost_model()
IDLE: Dispatcher = IlpDispatcher(TIMES, DispatchOptions(time_limit_s=30.0))
# Runs all steps of D at once.
WHOLE: Dispatcher = IlpDispatcher(TIMES, DispatchOptions(time_limit_s=30.0, segment_s=1e9))
ENCODE_S = 0.02


def decode_s(shape: Shape) -> float:
    return TIMES.seconds("one", Stage.DECODE, shape)


def test_a_lone_request_runs_together_on_one_worker() -> None:
    (assignment,) = decide(IDLE, [request("r", SMALL)], workers(1, "EDC"), now_s=3.0)
    assert assignment.primary is PlacementType.EDC
    assert assignment.encode == assignment.diffuse == assignment.decode == ("n0-w0",)
    run_s = ENCODE_S + 20 * step_seconds(SMALL, 1) + decode_s(SMALL)
    assert assignment.expected_finish_s == pytest.approx(3.0 + run_s)
    assert assignment.reason == f"EDC degree 1, {1000 - 3 - run_s:.2f} s to spare, uncontended"


def test_a_large_request_uses_idle_width_and_decodes_on_the_leader() -> None:
    (assignment,) = decide(WHOLE, [request("r", LARGE)], workers(4, "EDC"), now_s=0.0)
    assert assignment.diffuse == ("n0-w0", "n0-w1", "n0-w2", "n0-w3")
    assert assignment.encode == assignment.diffuse
    assert assignment.decode == ("n0-w0",)


def test_idle_width_is_used_as_far_as_it_is_faster() -> None:
    assert step_seconds(SMALL, 4) > step_seconds(SMALL, 1) > step_seconds(SMALL, 2)
    (assignment,) = decide(IDLE, [request("r", SMALL)], workers(4, "EDC"), now_s=0.0)
    assert len(assignment.diffuse) == 2


def test_the_degree_can_be_limited() -> None:
    limited = IlpDispatcher(TIMES, DispatchOptions(max_degree=2))
    (assignment,) = decide(limited, [request("r", LARGE)], workers(4, "EDC"), now_s=0.0)
    assert len(assignment.diffuse) == 2


def large(n: int, slo_s: float = 1000.0) -> list[PendingRequest]:
    return [request(f"r{i}", LARGE, slo_s) for i in range(n)]


@pytest.mark.parametrize("views", [workers(4, "EDC"), [*workers(4, "ED"), worker("c", "C")]], ids=["V0", "V2"])
def test_with_time_to_spare_each_has_the_width_that_does_the_most_per_worker(views: list[WorkerView]) -> None:
    assignments = decide(IDLE, large(4), views, now_s=0.0)
    assert [len(assignment.diffuse) for assignment in assignments] == [1, 1, 1, 1]
    assert {assignment.diffuse[0] for assignment in assignments} == {f"n0-w{i}" for i in range(4)}
    assert all(assignment.reason.endswith(", ilp") for assignment in assignments)


def test_width_that_is_left_over_is_used() -> None:
    assignments = decide(IDLE, large(2), workers(4, "EDC"), now_s=0.0)
    assert [len(assignment.diffuse) for assignment in assignments] == [2, 2]


def test_four_that_only_just_meet_their_deadlines_are_worth_more_than_two() -> None:
    slo_s = 2.5 * (ENCODE_S + 20 * step_seconds(LARGE, 1) + decode_s(LARGE))
    assignments = decide(IDLE, large(4, slo_s), workers(4, "EDC"), now_s=0.0)
    assert [len(assignment.diffuse) for assignment in assignments] == [1, 1, 1, 1]


def test_a_deadline_calls_for_width() -> None:
    tight_s = ENCODE_S + 20 * step_seconds(MIDDLE, 4) + decode_s(MIDDLE) + 0.01
    others = [request(f"o{i}", MIDDLE) for i in range(4)]
    (assignment,) = decide(IDLE, [*others, request("r", MIDDLE, tight_s)], workers(4, "EDC"), now_s=0.0)
    assert (assignment.request_ids, len(assignment.diffuse)) == (("r",), 4)
    assert len(decide(IDLE, others, workers(4, "EDC"), now_s=0.0)) == 4


def test_what_can_be_in_time_goes_before_what_cannot() -> None:
    pending = [request("hopeless", SMALL, 0.01), request("in time", LARGE, 20.0)]
    (assignment,) = decide(IDLE, pending, workers(1, "EDC"), now_s=0.0)
    assert assignment.request_ids == ("in time",)


def test_auxiliaries_take_the_stages_that_the_primary_lacks() -> None:
    views = [worker("d", "D"), worker("e1", "E", free_at_s=7.0), worker("e2", "E", free_at_s=6.0), worker("c", "C")]
    (assignment,) = decide(IDLE, [request("r", SMALL)], views, now_s=5.0)
    assert (assignment.encode, assignment.diffuse, assignment.decode) == (("e2",), ("d",), ("c",))
    run_s = ENCODE_S + 20 * step_seconds(SMALL, 1) + decode_s(SMALL)
    transfers_s = sum(TIMES.transfer_seconds("one", stage, SMALL) for stage in (Stage.ENCODE, Stage.DIFFUSE))
    assert assignment.expected_finish_s == pytest.approx(6.0 + run_s + transfers_s)


def test_a_request_is_not_given_up_for_decodes_that_it_goes_before() -> None:
    """All C's that wait at the auxiliary take 5 s. The small request can be in time, as its C is the most urgent."""
    queued = replace(worker("c", "C", free_at_s=5.5), promised_s=5.0)
    pending = [request("in time", SMALL, 3.0), request("long", LARGE, 8.0)]
    for auxiliary, first in ((queued, "in time"), (replace(queued, promised_s=0.0), "long")):
        (assignment,) = decide(IDLE, pending, [worker("d", "ED"), auxiliary], now_s=0.0)
        assert assignment.request_ids == (first,)


def test_an_auxiliary_in_the_same_node_is_preferred_and_queues_spread() -> None:
    views = [worker("a-e", "E", node="a"), worker("b-e", "E", node="b"), *workers(2, "DC", node="b")]
    assignments = decide(IDLE, [request("r1", SMALL), request("r2", SMALL)], views, now_s=0.0)
    assert [assignment.encode for assignment in assignments] == [("b-e",), ("a-e",)]


def test_less_communication_is_preferred_among_equals() -> None:
    views = [worker("1", "D"), worker("2", "DC"), worker("3", "EDC"), worker("4", "E"), worker("5", "C")]
    order = []
    while views and (assignments := decide(IDLE, [request("r", SMALL)], views, now_s=0.0)):
        order.append(assignments[0].primary)
        views = [view for view in views if view.worker_id not in assignments[0].diffuse]
    assert order == [PlacementType.EDC, PlacementType.DC, PlacementType.D]


def test_a_type_without_its_auxiliary_is_no_candidate() -> None:
    assert decide(IDLE, [request("r", SMALL)], [worker("d", "DC"), worker("x", "EDC", free_at_s=9.0)], 0.0) == []
    why = IDLE.can_ever_run(request("r", SMALL).spec, [worker("d", "DC"), worker("c", "C")])
    assert why == "one cannot make 256x256 here: DC workers: there is no auxiliary for encode"


def test_a_stopped_request_resumes_without_encoding() -> None:
    views = [worker("d", "DC")]  # no auxiliary for E, and none needed
    (assignment,) = decide(IDLE, [request("r", SMALL, steps_done=15)], views, now_s=0.0)
    assert assignment.encode == ()
    assert assignment.expected_finish_s == pytest.approx(5 * step_seconds(SMALL, 1) + decode_s(SMALL))


def test_a_size_that_was_profiled_at_wide_degrees_only_is_served() -> None:
    times = CostModel([wide_only_table()], "gpu")
    dispatcher = IlpDispatcher(times)
    spec = request("r", LARGE).spec
    assert dispatcher.can_ever_run(spec, workers(2, "EDC")) is None
    (assignment,) = decide(dispatcher, [request("r", LARGE)], workers(2, "EDC"), 0.0)
    assert len(assignment.diffuse) == 2
    # Degree 4 is efficient beside degree 2, so that four workers serve it at either.
    (wide,) = decide(dispatcher, [request("r", LARGE)], workers(4, "EDC"), 0.0)
    assert len(wide.diffuse) == 4
    assert "outside the profiled sizes" in str(dispatcher.can_ever_run(spec, workers(1, "EDC")))


def test_what_is_not_profiled_or_not_placed_is_said() -> None:
    views = workers(1, "EDC")
    for wrong, why in (
        (request("r", SMALL, model="three"), "no worker holds the diffuse stage of three"),
        (request("r", SMALL, model="two"), "no worker holds the diffuse stage of two"),
        (request("r", Shape(64, 64)), "outside the profiled sizes"),
    ):
        assert why in str(IDLE.can_ever_run(wrong.spec, views))
    assert decide(IDLE, [request("r", Shape(64, 64)), request("ok", SMALL)], views, 0.0)[0].request_ids[0] == "ok"


def test_several_outputs_need_their_memory_and_time() -> None:
    (assignment,) = decide(IDLE, [request("r", SMALL, num_outputs=3)], workers(1, "EDC"), 0.0)
    expected_s = ENCODE_S + 3 * (20 * step_seconds(SMALL, 1) + decode_s(SMALL))
    assert assignment.expected_finish_s == pytest.approx(expected_s)
    assert IDLE.can_ever_run(request("r", LARGE, num_outputs=5).spec, workers(1, "EDC")) is None
    assert IDLE.can_ever_run(request("r", LARGE, num_outputs=6).spec, workers(1, "EDC")) is not None


def test_the_earliest_deadline_goes_first_among_equals() -> None:
    pending = [request("later", SMALL, 60.0), request("first", SMALL, 50.0), request("last", SMALL, 70.0)]
    assignments = decide(IDLE, pending, workers(2, "EDC"), 0.0)
    assert [assignment.request_ids[0] for assignment in assignments] == ["first", "later"]


def test_an_overdue_request_runs_and_says_that_it_is_late() -> None:
    (assignment,) = decide(IDLE, [request("r", SMALL, 1.0)], workers(1, "EDC"), now_s=50.0)
    late_s = assignment.expected_finish_s - 1.0
    assert assignment.reason == f"EDC degree 1, late by {late_s:.2f} s, uncontended"


def test_a_worker_of_two_models_is_given_to_one() -> None:
    views = workers(1, "EDC", "two:EDC", memory_bytes=2 * EDC_BYTES)
    assignments = decide(IDLE, [request("a", SMALL), request("b", SMALL, model="two")], views, 0.0)
    assert len(assignments) == 1


def test_an_auxiliary_that_is_taken_as_a_primary_of_another_model_is_busy() -> None:
    shared = [worker("both", "two:EDC", "E", memory_bytes=2 * EDC_BYTES), worker("e", "E"), worker("d", "DC")]
    assignments = decide(IDLE, [request("a", SMALL), request("b", SMALL, model="two")], shared, 0.0)
    assert {assignment.request_ids[0]: assignment.encode for assignment in assignments} == {"a": ("e",), "b": ("both",)}


def cluster_of(entries: list[tuple[str, int, float | None]]) -> list[WorkerView]:
    return [
        worker(f"w{i:02d}", kind, node=f"n{node}", free_at_s=free_at_s)
        for i, (kind, node, free_at_s) in enumerate(entries)
    ]


def requests_of(entries: list[tuple[Shape, float, str, int]]) -> list[PendingRequest]:
    return [
        request(f"r{i}", shape, slo_s, model=model, steps_done=done)
        for i, (shape, slo_s, model, done) in enumerate(entries)
    ]


kinds = st.sampled_from(["EDC", "DC", "ED", "D", "E", "C", "two:EDC"])
free_at_s = st.one_of(st.none(), st.floats(0, 40))
views = st.lists(st.tuples(kinds, st.integers(0, 2), free_at_s), max_size=12).map(cluster_of)
shapes, models = st.sampled_from(SHAPES[:3]), st.sampled_from(["one", "two"])
requests = st.lists(st.tuples(shapes, st.floats(0, 60), models, st.integers(0, 20)), max_size=8).map(requests_of)


@given(requests, views, st.floats(0, 30))
def test_assignments_are_valid_whatever_the_cluster(
    pending: list[PendingRequest], views: list[WorkerView], now_s: float
) -> None:
    first, second = (IlpDispatcher(TIMES, DispatchOptions(time_limit_s=30.0)) for _ in range(2))
    assignments = decide(first, pending, views, now_s)
    assert assignments == decide(second, list(reversed(pending)), list(reversed(views)), now_s)
    by_id = {view.worker_id: view for view in views}
    specs = {entry.spec.request_id: entry for entry in pending}
    used = [worker_id for assignment in assignments for worker_id in assignment.diffuse]
    assert len(used) == len(set(used))
    assert len({assignment.request_ids[0] for assignment in assignments}) == len(assignments)
    for assignment in assignments:
        entry = specs[assignment.request_ids[0]]
        stages = {Stage.ENCODE: assignment.encode, Stage.DIFFUSE: assignment.diffuse, Stage.DECODE: assignment.decode}
        assert all(by_id[worker_id].idle for worker_id in assignment.diffuse)
        assert len({by_id[worker_id].node_id for worker_id in assignment.diffuse}) == 1
        assert len(assignment.diffuse) in (1, 2, 4)
        assert bool(assignment.encode) == (entry.steps_done == 0)
        assert assignment.expected_finish_s > now_s
        for stage, ids in stages.items():
            for worker_id in ids:
                view = by_id[worker_id]
                assert Replica(entry.spec.model, stage) in view.replicas
                degree = len(ids) if stage is Stage.DIFFUSE else 1
                need = compute_stages_peak_bytes(TIMES, entry.spec.model, [stage], entry.spec.shape, degree)
                assert sum_weights_bytes(TIMES, view.replicas) + need <= view.memory_bytes


@given(requests)
@example(requests_of([(SMALL, 1.0, "one", 0), (LARGE, 2.0, "one", 0)]))
def test_an_idle_worker_is_left_idle_only_for_a_request_that_needs_two_to_be_in_time(
    pending: list[PendingRequest],
) -> None:
    cluster = [*workers(2, "EDC"), *workers(2, "two:EDC", node="n1")]
    assignments = decide(IDLE, pending, cluster, now_s=0.0)
    served = {assignment.request_ids[0]: len(assignment.diffuse) for assignment in assignments}
    for model in ("one", "two"):
        waiting = [entry for entry in pending if entry.spec.model == model]
        used = sum(served.get(entry.spec.request_id, 0) for entry in waiting)
        assert used or not waiting
        if used < 2:
            left = [entry for entry in waiting if entry.spec.request_id not in served]
            assert all(finish_s(entry, 2) <= entry.deadline_s < finish_s(entry, 1) for entry in left)


def finish_s(entry: PendingRequest, degree: int) -> float:
    """The end of a request of `model` "one" or "two" that starts at 0 on this many idle workers."""
    encode_s = 0.0 if entry.steps_done else ENCODE_S
    steps = entry.spec.num_inference_steps - entry.steps_done
    shape = entry.spec.shape
    return encode_s + steps * TIMES.seconds(entry.spec.model, Stage.DIFFUSE, shape, degree) + decode_s(shape)
