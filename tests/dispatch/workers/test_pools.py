"""Pools and the choice of concrete workers: one node, best fit, sets that recur."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dispatch.solver.problem import GroupKind, Problem
from dispatch.workers.idle_workers import IdleWorkers
from dispatch.workers.pools import take_snapshot
from tests.dispatch.cluster import worker, workers
from tridentserve.stages import PlacementType


def test_workers_with_the_same_replicas_and_memory_are_one_pool() -> None:
    edc, dc = workers(2, "EDC"), workers(2, "DC", first=2)
    more = worker("n1-w0", "EDC", node="n1")
    other_memory, auxiliary = worker("n1-w1", "EDC", node="n1", memory_bytes=1), worker("n1-w2", "E", node="n1")
    two_models = worker("n1-w3", "EDC", "two:DC", node="n1")
    pools = take_snapshot([*edc, *dc, more, other_memory, auxiliary, two_models]).pools
    found = [(pool.types, [[view.worker_id for view in node] for node in pool.nodes]) for pool in pools]
    assert ({"one": PlacementType.EDC}, [["n0-w0", "n0-w1"], ["n1-w0"]]) in found
    assert ({"one": PlacementType.DC}, [["n0-w2", "n0-w3"]]) in found
    assert ({"one": PlacementType.EDC, "two": PlacementType.DC}, [["n1-w3"]]) in found
    assert len(found) == 4


def test_a_slot_starts_when_enough_workers_of_one_node_are_free() -> None:
    (pool,) = take_snapshot(
        [worker("a", "EDC"), worker("b", "EDC", free_at_s=9.0), worker("c", "EDC", node="n1", free_at_s=2.0)]
    ).pools
    assert pool.earliest_start_s(1, now_s=5.0) == 5.0
    assert pool.earliest_start_s(2, now_s=5.0) == 9.0
    assert pool.earliest_start_s(4, now_s=5.0) == float("inf")
    assert [view.worker_id for view in pool.find_first_free(1, now_s=5.0)] == ["a"]
    assert [view.worker_id for view in pool.find_first_free(2, now_s=5.0)] == ["a", "b"]
    assert pool.find_first_free(4, now_s=5.0) == ()
    assert pool.idle_per_node == (1, 0)


def idle_of(*busy: str) -> IdleWorkers:
    """Eight workers of a node, some busy."""
    names = [f"w{i}" for i in range(8)]
    (pool,) = take_snapshot([worker(name, "EDC", free_at_s=1.0 if name in busy else None) for name in names]).pools
    return IdleWorkers(pool)


def test_aligned_sets_recur_and_wide_blocks_stay_whole() -> None:
    idle = idle_of("w5")
    assert idle.take(1) == ("w4",)
    assert idle.take(1) == ("w6",)
    assert idle.take(4) == ("w0", "w1", "w2", "w3")
    assert idle.take(2) is None
    assert idle.take(1) == ("w7",)
    assert idle.take(1) is None


def test_without_an_aligned_set_any_will_do() -> None:
    idle = idle_of("w0", "w3", "w4", "w7")
    assert idle.take(2) == ("w1", "w2")
    assert idle.take(4) is None


def test_the_tightest_node_is_taken() -> None:
    views = [*workers(4, "EDC"), *workers(3, "EDC", node="n1"), *workers(2, "EDC", node="n2")]
    idle = IdleWorkers(take_snapshot(views).pools[0])
    assert idle.take(2) == ("n2-w0", "n2-w1")
    assert idle.take(2) == ("n1-w0", "n1-w1")
    assert idle.take(1) == ("n1-w2",)
    assert idle.take(4) == ("n0-w0", "n0-w1", "n0-w2", "n0-w3")


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=8), min_size=1, max_size=3),
    st.lists(st.sampled_from([1, 2, 4, 8]), max_size=10),
)
def test_whatever_fits_is_found_and_lies_in_one_node(nodes: list[list[bool]], degrees: list[int]) -> None:
    views = [
        worker(f"n{n}-w{i}", "EDC", node=f"n{n}", free_at_s=None if is_idle else 1.0)
        for n, members in enumerate(nodes)
        for i, is_idle in enumerate(members)
    ]
    (pool,) = take_snapshot(views).pools
    problem = Problem((), (pool.idle_per_node,))
    idle, left = IdleWorkers(pool), {view.worker_id for view in views if view.idle}
    if not problem.fits({GroupKind(0, degree): degrees.count(degree) for degree in degrees}):
        return
    for degree in sorted(degrees, reverse=True):
        taken = idle.take(degree)
        assert taken is not None
        assert len(set(taken)) == degree
        assert set(taken) <= left
        assert len({worker_id.partition("-")[0] for worker_id in taken}) == 1
        left -= set(taken)


@given(
    st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.frozensets(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=6),
)
def test_the_node_with_the_most_preferred_workers_is_taken_and_else_the_tightest(
    nodes: list[list[bool]], degree: int, preferred: frozenset[tuple[int, int]]
) -> None:
    views = [
        worker(f"n{n}-w{i}", "EDC", node=f"n{n}", free_at_s=None if is_idle else 1.0)
        for n, members in enumerate(nodes)
        for i, is_idle in enumerate(members)
    ]
    able = [n for n, members in enumerate(nodes) if sum(members) >= degree]
    taken = IdleWorkers(take_snapshot(views).pools[0]).take(degree, {f"n{n}-w{i}" for n, i in preferred})
    if not able:
        assert taken is None
        return

    def count_preferred(node: int) -> int:
        return min(degree, sum(nodes[node][i] for n, i in preferred if n == node))

    assert taken is not None
    best = max(able, key=lambda n: (count_preferred(n), -sum(nodes[n]), -n))
    assert {name.split("-")[0] for name in taken} == {f"n{best}"}
