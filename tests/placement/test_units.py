"""Model parallelism in placements: weights that no worker holds are divided among whole, aligned units of workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from placement import LoadShare, Orchestrator, align, count_moved_bytes
from placement.describe import describe_placement
from placement.packing import Group, pack_per_machine
from placement.shares import describe_shares
from placement.split import keeps_up, split
from placement.units import count_smallest_workable, list_block_sizes
from profiler import CostModel, compute_stages_peak_bytes, sum_weights_bytes
from tests.profiler.synthetic import DEGREES, MIB, SHAPES, WEIGHTS_BYTES, cost_model
from tests.support.units import choose_units, divide
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import PlacementError
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.stages import PlacementType, Stage, VirtualReplica

SMALL, MIDDLE, LARGE = SHAPES[0], SHAPES[1], SHAPES[2]
TIMES = cost_model()
D, E = Replica("one", Stage.DIFFUSE), Replica("one", Stage.ENCODE)
RESERVE_BYTES = 10 * MIB


def cluster(sizes: Iterable[int], memory_mib: int) -> list[WorkerSpec]:
    return [
        WorkerSpec(f"n{node}w{i}", f"n{node}", memory_mib * MIB, "gpu", i)
        for node, size in enumerate(sizes)
        for i in range(size)
    ]


def planned(
    load: list[LoadShare], workers: list[WorkerSpec], pooled: bool = True
) -> tuple[PlacementPlan, Mapping[Replica, int], CostModel]:
    units = choose_units(TIMES, load, workers, RESERVE_BYTES)
    times = divide(TIMES, units)
    return Orchestrator(times, RESERVE_BYTES, DEGREES, pooled).plan(load, workers), units, times


def broken_units(plan: PlacementPlan, workers: Iterable[WorkerSpec], units: Mapping[Replica, int]) -> list[str]:
    """Blocks of places of which some workers hold a divided stage and others do not, or that are not all there."""
    broken = []
    for replica, unit in units.items():
        holders: defaultdict[tuple[str, int], list[WorkerId]] = defaultdict(list)
        for worker in workers:
            if replica in plan.replicas[worker.worker_id]:
                holders[worker.node_id, worker.place // unit].append(worker.worker_id)
        broken += [f"{replica}: {members}" for members in holders.values() if len(members) != unit]
    return broken


def test_weights_are_divided_only_where_one_worker_cannot_hold_them() -> None:
    """At 256x256 D needs 800 MiB of weights and 6 to 24 MiB of activations, E 400 and 50."""
    load = [LoadShare("one", SMALL, 20)]
    sizes = {memory: choose_units(TIMES, load, cluster([8], memory), RESERVE_BYTES) for memory in (817, 815, 459, 260)}
    assert sizes == {817: {}, 815: {D: 2}, 459: {D: 2, E: 2}, 260: {D: 4, E: 2}}


def test_the_largest_size_of_the_load_decides() -> None:
    """Appendix E.2: under the maximum load. At 1024x1024, D needs 98 MiB beside the weights at degree 4."""
    workers = cluster([4], 905)
    assert choose_units(TIMES, [LoadShare("one", SMALL, 20)], workers, RESERVE_BYTES) == {}
    load = [LoadShare("one", SMALL, 20), LoadShare("one", LARGE, 20)]
    assert choose_units(TIMES, load, workers, RESERVE_BYTES) == {D: 2}
    assert choose_units(TIMES, [load[0], replace(load[1], weight=0.0)], workers, RESERVE_BYTES) == {}


def test_a_unit_is_a_block_of_one_node() -> None:
    assert list_block_sizes(cluster([8, 2], 1)) == [1, 2, 4, 8]
    assert list_block_sizes(cluster([7], 1)) == [1, 2, 4]
    assert list_block_sizes(cluster([1, 1, 1, 1], 1)) == [1]
    lost = [worker for worker in cluster([4], 1) if worker.place != 1]
    assert list_block_sizes(lost) == [1, 2]
    assert list_block_sizes([worker for worker in lost if worker.place != 2]) == [1]


def test_what_no_node_holds_is_refused_with_the_numbers() -> None:
    """D weighs 800 MiB: two of 300 do not hold it, and nodes have two."""
    workers = cluster([2, 2, 2, 2], 300)
    assert D not in choose_units(TIMES, [LoadShare("one", SMALL, 20)], workers, RESERVE_BYTES)
    message = r"one: the weights of diffuse alone are 838860800 bytes .* 4 of them would hold them .* no node has more"
    with pytest.raises(PlacementError, match=message):
        planned([LoadShare("one", SMALL, 20)], workers)


@pytest.mark.parametrize(("memory_mib", "kinds"), [(815, {"D/2C", "E"}), (600, {"D/2", "E", "C"})])
def test_the_virtual_replica_is_the_first_whose_shards_fit(memory_mib: int, kinds: set[str]) -> None:
    """At 256x256, half of D and C need 400 + 100 MiB of weights and 96 of activations, with E 400 more."""
    workers = cluster([8], memory_mib)
    plan, units, times = planned([LoadShare("one", SMALL, 20)], workers, pooled=False)
    assert units == {D: 2}
    cells = describe_placement(plan, workers, times)[1].split()[1:]
    assert set(cells[::2]) == kinds
    assert "in units of 2" in plan.reason
    (line,) = describe_shares(times)
    assert line.startswith("one D is divided among units of 2: ")
    assert line.endswith("each holds 0.4 GB of the weights")


def test_workers_that_make_no_unit_hold_nothing() -> None:
    workers = cluster([3, 3], 1000)
    times = divide(TIMES, {D: 2, E: 2})
    plan = Orchestrator(times, RESERVE_BYTES, DEGREES, one_pool=True).plan([LoadShare("one", SMALL, 20)], workers)
    assert [worker_id for worker_id, held in plan.replicas.items() if not held] == ["n0w2", "n1w2"]
    assert plan.reason.endswith("2 workers hold nothing: they make no whole unit in a node")
    assert describe_placement(plan, workers, times)[1].endswith("  - 1.0")


loads = st.lists(
    st.builds(LoadShare, st.sampled_from(["one", "two"]), st.sampled_from(SHAPES[:2]), st.just(20), st.floats(0.1, 9)),
    min_size=1,
    max_size=3,
)
node_sizes = st.lists(st.sampled_from([1, 2, 3, 4, 7, 8]), min_size=1, max_size=4)


@given(loads, st.lists(st.sampled_from([4, 7, 8]), min_size=2, max_size=4), st.integers(500, 1000), st.booleans())
def test_plans_keep_to_memory_and_whole_units_and_cover_the_load(
    load: list[LoadShare], sizes: list[int], memory_mib: int, pooled: bool
) -> None:
    workers = cluster(sizes, memory_mib)
    try:
        plan, units, times = planned(load, workers, pooled)
    except PlacementError:
        assume(False)
    assert (plan, units) == planned(load, workers, pooled)[:2]
    assert broken_units(plan, workers, units) == []
    for worker in workers:
        held = plan.replicas[worker.worker_id]
        for model in {replica.model for replica in held}:
            stages = {replica.stage for replica in held if replica.model == model}
            widest = max(times.degrees(model, Stage.DIFFUSE))
            smallest = min(share.shape for share in load if share.model == model)
            peak_bytes = compute_stages_peak_bytes(times, model, stages, smallest, widest)
            assert sum_weights_bytes(times, held) + peak_bytes + RESERVE_BYTES <= worker.memory_bytes
    for model in {share.model for share in load}:
        kinds = {plan.type_of(worker.worker_id, model) for worker in workers}
        assert any({virtual.primary, *virtual.auxiliaries} <= kinds for virtual in VirtualReplica)


units_of_types = st.fixed_dictionaries(dict.fromkeys(PlacementType, st.sampled_from([1, 2, 4])))
rates_of_types = st.fixed_dictionaries(dict.fromkeys(PlacementType, st.floats(0.1, 10)))


@given(st.sampled_from(VirtualReplica), st.integers(0, 60), rates_of_types, units_of_types)
def test_split_makes_whole_units(
    replica: VirtualReplica, extra: int, rates: dict[PlacementType, float], units: dict[PlacementType, int]
) -> None:
    minimum = units[replica.primary]
    budget = count_smallest_workable(replica, minimum, units) + extra
    counts = split(replica, budget, rates, minimum, units)
    assert all(count % units[kind] == 0 and count >= units[kind] for kind, count in counts.items())
    used = sum(counts.values())
    assert budget - min(units[kind] for kind in counts) < used <= budget
    fewer = {**counts, replica.primary: counts[replica.primary] - units[replica.primary]}
    is_rounding = used - units[replica.primary] <= budget - max(units[kind] for kind in counts)
    assert keeps_up(replica, fewer, rates) or counts[replica.primary] == minimum or not is_rounding


@given(st.sampled_from(VirtualReplica), st.integers(0, 12), rates_of_types, units_of_types)
def test_split_equals_brute_force_over_units(
    replica: VirtualReplica, extra: int, rates: dict[PlacementType, float], units: dict[PlacementType, int]
) -> None:
    """No more primaries would leave auxiliaries that keep up, however these are shared out; those beyond are of workers
    that make no unit of an auxiliary."""
    minimum = units[replica.primary]
    budget = count_smallest_workable(replica, minimum, units) + extra
    counts = split(replica, budget, rates, minimum, units)
    kinds = (replica.primary, *replica.auxiliaries)
    choices = product(*(range(units[kind], budget + 1, units[kind]) for kind in kinds))
    tried = [dict(zip(kinds, choice, strict=True)) for choice in choices if sum(choice) <= budget]
    most = max([each[replica.primary] for each in tried if keeps_up(replica, each, rates)], default=minimum)
    beyond = counts[replica.primary] - most
    assert 0 <= beyond < min([units[kind] for kind in replica.auxiliaries], default=1)
    assert beyond or keeps_up(replica, counts, rates) or most == minimum


@given(node_sizes, st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 4)), min_size=1, max_size=3))
def test_packing_puts_units_on_aligned_blocks(sizes: list[int], wanted: list[tuple[int, int]]) -> None:
    workers = cluster(sizes, 1)
    kinds = (PlacementType.D, PlacementType.E, PlacementType.C)
    groups = [
        Group("one", VirtualReplica.V3, kind, unit * n, unit, unit=unit)
        for kind, (unit, n) in zip(kinds, wanted, strict=False)
    ]
    total = sum(group.count for group in groups)
    assume(total <= len(workers) and (total == len(workers) or any(group.unit > 1 for group in groups)))
    placed = pack_per_machine(groups, workers)
    for group in groups:
        blocks: defaultdict[tuple[str, int], int] = defaultdict(int)
        for worker in workers:
            if placed.get(worker.worker_id) == group:
                blocks[worker.node_id, worker.place // group.unit] += 1
        assert set(blocks.values()) <= {group.unit}
        assert sum(blocks.values()) <= group.count
    largest = max(groups, key=lambda group: group.unit)
    room = sum(size // largest.unit * largest.unit for size in sizes)
    alike = sum(group.count for group in groups if group.unit == largest.unit)
    assert sum(placed.get(w.worker_id) in groups for w in workers) >= min(alike, room)


@given(node_sizes, st.integers(0, 9), st.integers(0, 9), st.data())
def test_a_transition_keeps_units_whole(sizes: list[int], before: int, after: int, data: st.DataObject) -> None:
    """D in units of 2, E in units of 4, C alone, in any numbers: what is placed stays whole, and no more bytes move."""
    workers, units = cluster(sizes, 1), {D: 2, E: 4}
    times = divide(TIMES, units)

    def some(number: int) -> PlacementPlan:
        draw = data.draw(st.permutations([(PlacementType.D, 2), (PlacementType.E, 4), (PlacementType.C, 1)]))
        left, groups = len(workers), []
        for kind, unit in draw[: 1 + number % 3]:
            count = left // 2 // unit * unit
            groups += [Group("one", VirtualReplica.V3, kind, count, unit, unit=unit)] if count else []
            left -= count
        if all(group.unit == 1 for group in groups):
            groups = [Group("one", VirtualReplica.V0, PlacementType.C, len(workers))]
        placed = pack_per_machine(groups, workers)
        return PlacementPlan({w.worker_id: placed[w.worker_id].held if w.worker_id in placed else frozenset()
                              for w in workers})  # fmt: skip

    current, wanted = some(before), some(after)
    aligned = align(wanted, current, workers, times)
    assert broken_units(aligned, workers, units) == []
    assert sorted(map(sorted, aligned.replicas.values())) == sorted(map(sorted, wanted.replicas.values()))
    moved = sum(count_moved_bytes(aligned, current, workers, times).values())
    assert moved <= sum(count_moved_bytes(wanted, current, workers, times).values())


stage_sets = st.sampled_from([frozenset[Replica](), frozenset({D}), frozenset({Replica("one", Stage.DECODE)})])


@given(st.lists(stage_sets, min_size=4, max_size=4), st.lists(stage_sets, min_size=4, max_size=4), st.booleans())
def test_a_transition_of_units_equals_brute_force(
    before: list[frozenset[Replica]], after: list[frozenset[Replica]], apart: bool
) -> None:
    """Four pairs of workers, of one node or of two: no other order of nodes and pairs moves less."""
    workers, times = cluster([4, 4] if apart else [8], 1), divide(TIMES, {D: 2})
    ids = [worker.worker_id for worker in workers]

    def plan(pairs: Iterable[frozenset[Replica]]) -> PlacementPlan:
        return PlacementPlan(dict(zip(ids, [held for held in pairs for _ in range(2)], strict=True)))

    current, wanted = plan(before), plan(after)
    orders = list(permutations(after))
    if apart:  # what is in one node stays in one node
        nodes = ((after[:2], after[2:]), (after[2:], after[:2]))
        orders = [(*a, *b) for first, second in nodes for a in permutations(first) for b in permutations(second)]
    least = min(sum(count_moved_bytes(plan(order), current, workers, times).values()) for order in orders)
    assert sum(count_moved_bytes(align(wanted, current, workers, times), current, workers, times).values()) == least


def test_a_switch_moves_shards_only() -> None:
    workers = cluster([4], 1)
    ids = [worker.worker_id for worker in workers]
    times = divide(TIMES, {D: 2})
    d, c = frozenset({D}), frozenset({Replica("one", Stage.DECODE)})
    current = PlacementPlan(dict(zip(ids, (c, c, d, d), strict=True)))
    wanted = PlacementPlan(dict(zip(ids, (d, d, d, d), strict=True)))
    moved = count_moved_bytes(align(wanted, current, workers, times), current, workers, times)
    assert list(moved.values()) == [WEIGHTS_BYTES[Stage.DIFFUSE] // 2] * 2 + [0, 0]
    swapped = PlacementPlan(dict(zip(ids, (d, d, c, c), strict=True)))
    assert align(swapped, current, workers, times).replicas == current.replicas
