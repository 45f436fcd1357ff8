"""Batches: which requests join, how long they take, and that no request on time becomes late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch import DispatchOptions, IlpDispatcher
from profiler import CostModel, ProfileTable
from profiler.memory import compute_stages_peak_bytes, sum_weights_bytes
from tests.dispatch.cluster import decide, request, worker, workers
from tests.profiler.synthetic import EDC_BYTES, MIB, SHAPES, table
from tridentserve.protocols import PendingRequest, WorkerView
from tridentserve.stages import Stage

SMALL, MIDDLE, LARGE = SHAPES[:3]


def batched_table() -> ProfileTable:
    """D of 256x256 hardly slows down up to a batch of 4; larger sizes gain nothing."""
    whole = table()
    more = [
        replace(row, batch=batch, seconds=row.seconds * (1 + 0.04 * batch), peak_bytes=row.peak_bytes * batch)
        for row in whole.rows
        for batch in (2, 4)
        if row.stage is Stage.DIFFUSE and row.shape == SMALL
    ]
    return replace(whole, rows=(*whole.rows, *more))


TIMES = CostModel([batched_table()], "gpu")
IN_BATCHES = DispatchOptions(max_batch=8)


def ids(pending: list[PendingRequest], views: list[WorkerView], now_s: float = 0.0) -> list[tuple[str, ...]]:
    return [assignment.request_ids for assignment in decide(IlpDispatcher(TIMES, IN_BATCHES), pending, views, now_s)]


def small(n: int, slo_s: float = 1000.0) -> list[PendingRequest]:
    return [request(f"r{i}", SMALL, slo_s + i) for i in range(n)]


def test_requests_without_a_slot_join_the_first_of_their_kind_up_to_the_optimal_batch() -> None:
    assert TIMES.optimal_batch("one", Stage.DIFFUSE, SMALL) == 4
    assert ids(small(6), workers(1, "EDC")) == [("r0", "r1", "r2", "r3")]
    limited = IlpDispatcher(TIMES, DispatchOptions(max_batch=2))
    assert decide(limited, small(6), workers(1, "EDC"), 0.0)[0].request_ids == ("r0", "r1")
    assert decide(IlpDispatcher(TIMES), small(6), workers(1, "EDC"), 0.0)[0].request_ids == ("r0",)


def test_with_idle_workers_for_all_nobody_shares() -> None:
    assert ids(small(3), workers(3, "EDC")) == [("r0",), ("r1",), ("r2",)]


def test_only_equal_work_is_shared() -> None:
    others = [
        request("larger", MIDDLE, 2000.0),
        request("longer", SMALL, 2000.0, steps=21),
        request("more", SMALL, 2000.0, num_outputs=2),
        request("begun", SMALL, 2000.0, steps=41, steps_done=1),
        request("failed before", SMALL, 2000.0, alone=True),
    ]
    assert ids([*small(2), *others], workers(1, "EDC")) == [("r0", "r1")]
    assert ids([request(f"r{i}", MIDDLE, 1000.0 + i) for i in range(3)], workers(1, "EDC")) == [("r0",)]


def test_requests_of_a_batch_may_have_different_loras() -> None:
    pending = [request(f"r{i}", SMALL, 1000.0 + i, loras=("one:ink",) if i else ()) for i in range(2)]
    assert ids(pending, workers(1, "EDC")) == [("r0", "r1")]


def test_a_request_that_must_run_alone_does() -> None:
    apart = [request(f"r{i}", SMALL, 1000.0 + i, alone=True) for i in range(3)]
    assert ids(apart, workers(1, "EDC")) == [("r0",)]


def test_outputs_count_towards_the_batch() -> None:
    pairs = [request(f"r{i}", SMALL, 1000.0 + i, num_outputs=2) for i in range(4)]
    assert ids(pairs, workers(1, "EDC")) == [("r0", "r1")]


def test_a_batch_takes_its_time_and_its_members_are_decoded_one_after_the_other() -> None:
    (assignment,) = decide(IlpDispatcher(TIMES, IN_BATCHES), small(4), [worker("d", "DC"), worker("e", "E")], 0.0)
    assert (assignment.encode, assignment.decode) == (("e",), ("d",))
    encode_s = TIMES.seconds("one", Stage.ENCODE, SMALL, batch=4) + TIMES.transfer_seconds(
        "one", Stage.ENCODE, SMALL, 4
    )
    diffuse_s = 20 * TIMES.seconds("one", Stage.DIFFUSE, SMALL, batch=4)
    decode_s = 4 * TIMES.seconds("one", Stage.DECODE, SMALL)
    assert assignment.expected_finish_s == pytest.approx(encode_s + diffuse_s + decode_s)
    assert assignment.reason.startswith("DC degree 1, batch of 4, ")


def test_whoever_would_make_another_late_does_not_join() -> None:
    (alone,) = decide(IlpDispatcher(TIMES, IN_BATCHES), small(1), workers(1, "EDC"), 0.0)
    tight = request("tight", SMALL, alone.expected_finish_s + 1e-3)
    assert ids([tight, *small(3)], workers(1, "EDC")) == [("tight",)]


def test_the_late_share_with_the_late_only() -> None:
    late = [request(f"late{i}", SMALL, 1.0 + i / 10) for i in range(3)]
    assert ids(late, workers(1, "EDC"), now_s=50.0) == [("late0", "late1", "late2")]
    assert ids([late[0], request("later", SMALL, 60.0)], workers(1, "EDC"), now_s=50.0) == [("late0",)]


def test_memory_limits_the_batch() -> None:
    # D of 256x256 takes 800 MiB and 24.4 a member; that is more than E or C needs, which can be apart from it.
    views = workers(1, "EDC", memory_bytes=800 * MIB + 96 * MIB)
    assert ids(small(4), views) == [("r0", "r1", "r2")]
    assert ids(small(4), workers(1, "EDC", memory_bytes=800 * MIB + 98 * MIB)) == [("r0", "r1", "r2", "r3")]


def test_a_batch_may_have_less_room_for_all_stages_at_once_than_one_request() -> None:
    """All weights are 1300 MiB; C needs 96 MiB for one member at a time, and D of four 98."""
    views = workers(1, "EDC", memory_bytes=1300 * MIB + 97 * MIB)
    (four,) = decide(IlpDispatcher(TIMES, IN_BATCHES), small(4), views, 0.0)
    assert len(four.request_ids) == 4
    assert four.apart == {Stage.DECODE}
    (one,) = decide(IlpDispatcher(TIMES, IN_BATCHES), small(1), views, 0.0)
    assert one.apart == set()


def cluster_of(entries: list[tuple[str, int, float | None]]) -> list[WorkerView]:
    return [
        worker(f"w{i:02d}", kind, node=f"n{node}", free_at_s=free_at_s)
        for i, (kind, node, free_at_s) in enumerate(entries)
    ]


kinds = st.sampled_from(["EDC", "EDC", "DC", "ED", "D", "E", "C"])
views_of = st.lists(st.tuples(kinds, st.integers(0, 1), st.none() | st.floats(0, 5)), max_size=8).map(cluster_of)
pending_of = st.lists(st.tuples(st.sampled_from([SMALL, SMALL, MIDDLE]), st.floats(0, 3)), max_size=12).map(
    lambda entries: [request(f"r{i:02d}", shape, slo_s) for i, (shape, slo_s) in enumerate(entries)]
)


@given(pending_of, views_of, st.floats(0, 2))
def test_no_member_in_time_becomes_late_and_no_batch_is_too_large(
    pending: list[PendingRequest], views: list[WorkerView], now_s: float
) -> None:
    by_id = {entry.spec.request_id: entry for entry in pending}
    held = {view.worker_id: view.replicas for view in views}
    assignments = decide(IlpDispatcher(TIMES, IN_BATCHES), pending, views, now_s)
    assert assignments == decide(IlpDispatcher(TIMES, DispatchOptions(max_batch=8)), pending, views, now_s)
    served = [request_id for assignment in assignments for request_id in assignment.request_ids]
    assert len(served) == len(set(served))
    for assignment in assignments:
        members = [by_id[request_id] for request_id in assignment.request_ids]
        spec, n, degree = members[0].spec, len(members), len(assignment.diffuse)
        assert {member.spec.shape for member in members} == {spec.shape}
        assert n <= max(1, TIMES.optimal_batch("one", Stage.DIFFUSE, spec.shape, degree))
        need = compute_stages_peak_bytes(TIMES, "one", [Stage.DIFFUSE], spec.shape, degree, n)
        assert all(sum_weights_bytes(TIMES, held[w]) + need <= EDC_BYTES for w in assignment.diffuse)
        if n > 1:
            in_time = [assignment.expected_finish_s <= member.deadline_s + 1e-9 for member in members]
            assert all(in_time) or not any(in_time)


@given(pending_of, views_of)
def test_batches_only_add(pending: list[PendingRequest], views: list[WorkerView]) -> None:
    """Whoever has a group without batches has the same one with them, or joined another of its kind."""
    alone = {entry.request_ids[0]: entry.diffuse for entry in decide(IlpDispatcher(TIMES), pending, views, 0.0)}
    together = {
        entry.request_ids[0]: entry.diffuse for entry in decide(IlpDispatcher(TIMES, IN_BATCHES), pending, views, 0.0)
    }
    assert together == alone
