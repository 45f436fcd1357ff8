"""PackPerMachine: every worker gets a type, whole nodes one kind, remainders beside their kin."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.packing import Group, pack_per_machine
from tridentserve.cluster import WorkerSpec
from tridentserve.stages import PlacementType, VirtualReplica


def cluster(*sizes: int) -> list[WorkerSpec]:
    return [WorkerSpec(f"n{node}-w{i}", f"n{node}", 1) for node, size in enumerate(sizes) for i in range(size)]


def groups_of(**counts: int) -> list[Group]:
    replica_of = {"EDC": "V0", "DC": "V1", "E": "V1", "ED": "V2", "C": "V2"}
    return [Group("m", VirtualReplica(replica_of[kind]), PlacementType(kind), n) for kind, n in counts.items()]


def kinds_by_node(placed: dict[str, Group]) -> dict[str, Counter[str]]:
    nodes: dict[str, Counter[str]] = {}
    for worker_id, group in placed.items():
        nodes.setdefault(worker_id.partition("-")[0], Counter())[group.kind] += 1
    return nodes


def test_whole_nodes_hold_one_kind() -> None:
    nodes = kinds_by_node(pack_per_machine(groups_of(EDC=17, DC=12, E=3), cluster(8, 8, 8, 8)))
    assert [nodes[f"n{node}"] for node in range(3)] == [{"EDC": 8}, {"EDC": 8}, {"DC": 8}]
    assert nodes["n3"] == {"EDC": 1, "DC": 4, "E": 3}


def test_an_auxiliary_goes_beside_its_primaries() -> None:
    nodes = kinds_by_node(pack_per_machine(groups_of(EDC=3, DC=3, E=1, ED=3, C=1), cluster(4, 4, 3)))
    assert {"DC": 3, "E": 1} in nodes.values()
    assert {"ED": 3, "C": 1} in nodes.values()


def test_a_remainder_stays_together_where_it_can() -> None:
    nodes = kinds_by_node(pack_per_machine(groups_of(EDC=6, DC=5, E=5), cluster(8, 8)))
    assert nodes == {"n0": {"EDC": 6, "E": 2}, "n1": {"DC": 5, "E": 3}}


def test_primaries_that_must_be_together_come_first() -> None:
    many = Group("a", VirtualReplica.V0, PlacementType.EDC, 3)
    wide = Group("b", VirtualReplica.V0, PlacementType.EDC, 2, together=2)
    placed = pack_per_machine([many, wide], cluster(1, 2, 1, 1))
    assert {worker_id for worker_id, group in placed.items() if group == wide} == {"n1-w0", "n1-w1"}


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.data())
def test_every_worker_is_placed_and_every_count_kept(sizes: list[int], data: st.DataObject) -> None:
    workers, left, counts = cluster(*sizes), sum(sizes), {}
    for kind in ("EDC", "DC", "E"):
        counts[kind] = data.draw(st.integers(0, left))
        left -= counts[kind]
    groups = groups_of(**counts, C=left)
    placed = pack_per_machine(groups, workers)
    assert set(placed) == {worker.worker_id for worker in workers}
    assert Counter(group.kind for group in placed.values()) == +Counter({group.kind: group.count for group in groups})
    assert placed == pack_per_machine(list(reversed(groups)), list(reversed(workers)))


def test_counts_that_do_not_match_the_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 workers to place on 4"):
        pack_per_machine(groups_of(EDC=3), cluster(4))
