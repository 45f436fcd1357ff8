"""The hot set: the blocks that dispatchers prefer, under the names that the scheduler gives them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dispatch.workers.idle_workers import IdleWorkers
from dispatch.workers.pools import group_into_pools
from tridentserve.cluster import WorkerSpec
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.scheduling.estimation.hot_groups import list_hot_groups
from tridentserve.scheduling.workers.worker_pool import WorkerPool
from tridentserve.stages import PlacementType


def cluster(kinds: list[str], per_node: int) -> tuple[list[WorkerSpec], PlacementPlan]:
    workers = [
        WorkerSpec(f"n{i // per_node}w{i % per_node}", f"node{i // per_node}", 1, place=i % per_node)
        for i in range(len(kinds))
    ]
    held = {
        worker.worker_id: frozenset(Replica("m", stage) for stage in PlacementType(kind).stages)
        for worker, kind in zip(workers, kinds, strict=True)
    }
    return workers, PlacementPlan(held)


def test_of_eight_alike_four_pairs_two_quads_one_octet() -> None:
    workers, placement = cluster(["EDC"] * 8, 8)
    assert [len(group.workers) for group in list_hot_groups(workers, placement, 8)] == [2, 2, 2, 2, 4, 4, 8]
    assert [len(group.workers) for group in list_hot_groups(workers, placement, 2)] == [2, 2, 2, 2]
    assert list_hot_groups(workers, placement, 1) == []


def test_only_workers_that_may_run_together() -> None:
    workers, placement = cluster(["E", "D", "D", "C", "DC", "D", "D", "EDC"], 4)
    assert [group.workers for group in list_hot_groups(workers, placement, 4)] == [("n0w1", "n0w2"), ("n1w1", "n1w2")]


def test_blocks_follow_places_where_names_have_two_digits() -> None:
    """By name, the worker at place 10 would come after that at place 1."""
    workers, placement = cluster(["D"] * 12, 12)
    quads = [group.workers for group in list_hot_groups(workers, placement, 4) if len(group.workers) == 4]
    places = {worker.worker_id: worker.place for worker in workers}
    assert [[places[worker] for worker in quad] for quad in quads] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


kinds_of_workers = st.lists(st.sampled_from(["EDC", "D", "E"]), min_size=1, max_size=12)


@given(kinds_of_workers, st.integers(1, 12), st.sampled_from([2, 4, 8]))
def test_the_first_sets_of_an_idle_cluster_are_hot(kinds: list[str], per_node: int, degree: int) -> None:
    """Whatever set of `degree` workers a dispatcher is given on an idle cluster has its group, under the same name."""
    workers, placement = cluster(kinds, per_node)
    pool = WorkerPool(workers, placement)
    hot = {group.workers: group.name for group in list_hot_groups(workers, placement, 8)}
    for alike in group_into_pools(pool.list_idle_views()):
        taken = IdleWorkers(alike).take(degree) if alike.types else None
        if taken is not None:
            assert hot[taken] == pool.group_name(taken)
