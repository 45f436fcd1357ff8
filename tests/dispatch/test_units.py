"""Units of workers that hold a stage's weights together are given out, and count as idle, as a whole; E and C may take
several auxiliaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch import DispatchOptions, IlpDispatcher
from dispatch.policies import POLICIES, make_policy
from dispatch.solver.ilp import solve
from dispatch.solver.problem import GroupKind, Problem, RequestClass, is_feasible
from dispatch.workers.auxiliaries import Auxiliaries
from dispatch.workers.idle_workers import IdleWorkers
from dispatch.workers.memory_fit import MemoryCheck
from dispatch.workers.pools import Pool, take_snapshot
from dispatch.workers.residency import LoadTimes
from placement import LoadShare
from profiler import CostModel, compute_stages_peak_bytes, sum_weights_bytes
from tests.dispatch.cluster import decide, request, worker
from tests.profiler.synthetic import MIB, SHAPES, cost_model, row, step_seconds, table
from tests.support.units import divide
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ProfileError
from tridentserve.plans import Replica
from tridentserve.protocols import Assignment, PendingRequest, WorkerView
from tridentserve.requests import Shape
from tridentserve.stages import Stage

WITH_UNITS = [name for name, spec in POLICIES.items() if spec.supports_units]

SMALL, LARGE = SHAPES[0], SHAPES[2]
D, E, C = (Replica("one", stage) for stage in (Stage.DIFFUSE, Stage.ENCODE, Stage.DECODE))
# D needs 400 MiB of weights on each of two, E 200: neither fits such a worker whole beside what it needs.
TIMES = divide(cost_model(), {D: 2, E: 2})
MEMORY_BYTES = 600 * MIB


def node(kinds: str, name: str = "n0", busy: Iterable[int] = (), memory_bytes: int = MEMORY_BYTES) -> list[WorkerView]:
    """Workers of model `one` at the places 0, 1, ...; those at `busy` are free at 9 s. `-` is a worker that is lost."""
    return [
        replace(
            worker(f"{name}w{i}", kind, node=name, free_at_s=9.0 if i in busy else None, memory_bytes=memory_bytes),
            place=i,
        )
        for i, kind in enumerate(kinds.split())
        if kind != "-"
    ]


def pool_of(views: Sequence[WorkerView]) -> Pool:
    (pool,) = take_snapshot(views, MemoryCheck(TIMES, DispatchOptions()).find_unit).pools
    return pool


def ids(views: Iterable[WorkerView]) -> list[str]:
    return [view.worker_id for view in views]


def test_workers_count_as_idle_in_whole_units() -> None:
    pool = pool_of([*node("D D D D D D", busy=[1]), *node("D D", "n1", busy=[0, 1])])
    assert (pool.unit, pool.largest_node, pool.idle_per_node) == (2, 6, (4, 0))
    assert ids(pool.list_units(pool.nodes[0])[0]) == ["n0w0", "n0w1"]
    assert pool.earliest_start_s(4, now_s=1.0) == 1.0
    assert pool.earliest_start_s(2, now_s=1.0) == 1.0
    assert pool_of(node("D D D D", busy=[3])).earliest_start_s(4, now_s=1.0) == 9.0
    assert ids(pool_of(node("D D D D", busy=[1])).find_first_free(2, now_s=1.0)) == ["n0w2", "n0w3"]


def test_a_unit_that_lost_a_worker_holds_nothing() -> None:
    """Units are blocks of places: the workers that are left do not form another one with a neighbour."""
    pool = pool_of(node("D - D D D -"))
    assert [ids(members) for members in pool.nodes] == [["n0w2", "n0w3"]]
    snapshot = take_snapshot(node("D - - D"), MemoryCheck(TIMES, DispatchOptions()).find_unit)
    assert snapshot.pools == ()
    assert snapshot.update(node("D - - D", busy=[3])).all_pools[0].idle_per_node == (1,)


def test_whole_units_are_given_out() -> None:
    idle = IdleWorkers(pool_of(node("D D D D D D D D", busy=[2])))
    assert idle.take(2) == ("n0w0", "n0w1")
    assert idle.take(2, preferred=["n0w7"]) == ("n0w6", "n0w7")
    assert idle.take(4) is None
    assert idle.take(2) == ("n0w4", "n0w5")
    assert idle.take(2) is None


def test_a_shard_takes_its_share_of_the_time_to_load() -> None:
    views = [replace(view, resident=frozenset() if view.place in (0, 2) else view.replicas) for view in node("D D D D")]
    whole_s = cost_model().load_seconds("one", Stage.DIFFUSE)
    shard_s = TIMES.load_seconds("one", Stage.DIFFUSE)
    assert shard_s < whole_s
    assert LoadTimes(pool_of(views), "one", [Stage.DIFFUSE], TIMES).find_least_s(2) == shard_s


loaded = st.one_of(st.none(), st.frozensets(st.sampled_from([E, D, C])))
load_nodes = st.lists(st.lists(st.tuples(st.booleans(), loaded), min_size=2, max_size=6), min_size=1, max_size=3)


@given(load_nodes, st.sampled_from([TIMES, cost_model()]), st.sampled_from([2, 4]))
def test_the_least_time_to_load_is_that_of_the_best_choice_of_units(
    nodes: list[list[tuple[bool, frozenset[Replica] | None]]], times: CostModel, degree: int
) -> None:
    views = [
        replace(worker(f"n{n}w{i}", "ED", node=f"n{n}", free_at_s=None if idle else 9.0), place=i, resident=resident)
        for n, node_workers in enumerate(nodes)
        for i, (idle, resident) in enumerate(node_workers[: len(node_workers) // 2 * 2])
    ]
    (pool,) = take_snapshot(views, MemoryCheck(times, DispatchOptions()).find_unit).pools
    stages = [Stage.ENCODE, Stage.DIFFUSE]

    def missing_s(view: WorkerView) -> float:
        missing = [
            stage for stage in stages if view.resident is not None and Replica("one", stage) not in view.resident
        ]
        return sum(times.load_seconds("one", stage) for stage in missing)

    groups = [
        [view for unit in units for view in unit]
        for members in pool.nodes
        for units in combinations(pool.list_units(members), degree // pool.unit)
    ]
    idle = [group for group in groups if all(view.idle for view in group)]
    expected = min((max(map(missing_s, group)) for group in idle or groups), default=float("inf"))
    assert LoadTimes(pool, "one", stages, times).find_least_s(degree) == pytest.approx(expected)


# The integer program with units of 2: idle workers come in pairs, and groups are of 2 or 4.
unit_slots = st.builds(GroupKind, pool=st.just(0), degree=st.sampled_from([2, 4]))
classes = st.builds(
    RequestClass,
    count=st.integers(1, 2),
    values=st.dictionaries(unit_slots, st.integers(1, 1000).map(lambda n: n / 4), max_size=2),
)
busy_places = st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=3)


@given(st.lists(classes, max_size=3), busy_places)
def test_the_ilp_equals_brute_force_over_pairs(items: list[RequestClass], busy: list[set[int]]) -> None:
    """The brute force looks at pairs of places, the program at what the pool says is idle."""
    pool = pool_of([view for n, places in enumerate(busy) for view in node("D D D D D D", f"n{n}", places)])
    problem = Problem(tuple(items), (pool.idle_per_node,))
    pairs = [sum({place, place + 1}.isdisjoint(places) for place in (0, 2, 4)) for places in busy]

    def fits(groups: Sequence[GroupKind]) -> bool:
        return any(
            all(
                sum(group.degree // 2 for group, number in zip(groups, where, strict=True) if number == n) <= free
                for n, free in enumerate(pairs)
            )
            for where in product(range(len(pairs)), repeat=len(groups))
        )

    choices = [[None, *item.values.items()] for item in items for _ in range(item.count)]
    tried = [[pair for pair in combination if pair is not None] for combination in product(*choices)]
    best = max(sum(value for _, value in chosen) for chosen in tried if fits([group for group, _ in chosen]))
    solution = solve(problem, DispatchOptions(time_limit_s=30.0, gap=0.0))
    assert is_feasible(problem, solution.counts)
    assert solution.evaluate(problem) == pytest.approx(best)
    idle = IdleWorkers(pool)
    taken = Counter[GroupKind]()
    for (_, group), n in solution.counts.items():
        taken[group] += n
    for group in sorted(taken.elements(), key=lambda group: -group.degree):
        workers = idle.take(group.degree)
        assert workers is not None
        assert whole_units(workers, 2)


def whole_units(workers: Sequence[str], unit: int) -> bool:
    """True when ids such as n0w3 fill aligned blocks of places of one node."""
    places = sorted(int(worker_id.partition("w")[2]) for worker_id in workers)
    nodes = {worker_id.partition("w")[0] for worker_id in workers}
    return len(nodes) == 1 and all(n == unit for n in Counter(place // unit for place in places).values())


kinds = st.sampled_from(["D", "E", "C", "ED", "-"])
nodes = st.lists(st.tuples(st.lists(kinds, min_size=2, max_size=8), st.sets(st.integers(0, 7))), max_size=3)
shapes = st.sampled_from(SHAPES[:2])
entries = st.lists(st.tuples(shapes, st.floats(0, 60), st.integers(0, 20)), min_size=1, max_size=6)


@given(entries, nodes, st.sampled_from(WITH_UNITS))
def test_assignments_take_whole_units_whatever_the_cluster(
    wanted: list[tuple[Shape, float, int]], members: list[tuple[list[str], set[int]]], policy: str
) -> None:
    views = [view for n, (kinds, busy) in enumerate(members) for view in node(" ".join(kinds), f"n{n}", busy)]
    pending = [request(f"r{i}", shape, slo_s, steps_done=done) for i, (shape, slo_s, done) in enumerate(wanted)]
    specs = [WorkerSpec(view.worker_id, view.node_id, view.memory_bytes, "gpu", view.place) for view in views]
    if not specs:
        return
    dispatcher = make_policy(policy, TIMES, specs, [LoadShare("one", SMALL, 20)], DispatchOptions()).dispatcher
    assignments = decide(dispatcher, pending, views, now_s=0.0)
    used = [worker_id for assignment in assignments for worker_id in assignment.diffuse]
    assert len(used) == len(set(used))
    by_id = {view.worker_id: view for view in views}
    for assignment in assignments:
        assert all(by_id[worker_id].idle for worker_id in assignment.diffuse)
        check(assignment, pending[int(assignment.request_ids[0][1:])], by_id)


def check(assignment: Assignment, entry: PendingRequest, by_id: dict[str, WorkerView]) -> None:
    """Every stage is on workers that hold it, whole units of those that hold it together, and fits their memory."""
    stages = {Stage.ENCODE: assignment.encode, Stage.DIFFUSE: assignment.diffuse, Stage.DECODE: assignment.decode}
    for stage, workers in stages.items():
        assert not workers or whole_units(workers, TIMES.unit("one", stage))
        for worker_id in workers:
            view = by_id[worker_id]
            assert Replica("one", stage) in view.replicas
            peak_bytes = compute_stages_peak_bytes(TIMES, "one", [stage], entry.spec.shape, len(assignment.diffuse))
            assert sum_weights_bytes(TIMES, view.replicas) + peak_bytes <= view.memory_bytes


def test_a_stage_runs_at_the_degree_of_its_unit_or_wider() -> None:
    dispatcher = IlpDispatcher(TIMES)
    views = node("D D D D E E C")
    (assignment,) = decide(dispatcher, [request("r", SMALL)], views, now_s=0.0)
    assert assignment.diffuse in (("n0w0", "n0w1"), ("n0w0", "n0w1", "n0w2", "n0w3"))
    assert (assignment.encode, assignment.decode) == (("n0w4", "n0w5"), ("n0w6",))
    spec = request("r", SMALL).spec
    assert dispatcher.can_ever_run(spec, node("D D - - E E C")) is None
    why = "one cannot make 256x256 here: "
    assert dispatcher.can_ever_run(spec, node("D - - D E E C")) == f"{why}no worker holds the diffuse stage of one"
    assert dispatcher.can_ever_run(spec, node("D D - - - E C")) == f"{why}D workers: there is no auxiliary for encode"
    assert decide(dispatcher, [request("r", SMALL)], node("D D D D E E C", busy=[0, 3]), 0.0) == []


def test_costs_are_those_of_the_degree() -> None:
    """D from its profile; E, which was profiled at degree 1, takes as long on its unit."""
    assert TIMES.degrees("one", Stage.DIFFUSE) == (2, 4)
    assert TIMES.seconds("one", Stage.DIFFUSE, LARGE, 2) == step_seconds(LARGE, 2)
    assert TIMES.degrees("one", Stage.ENCODE) == (2,)
    assert TIMES.seconds("one", Stage.ENCODE, LARGE, 2) == cost_model().seconds("one", Stage.ENCODE, LARGE)
    assert TIMES.weights_bytes("one", Stage.ENCODE) == 200 * MIB
    assert TIMES.optimal_degree("one", Stage.DIFFUSE, SMALL) >= 2
    learning = divide(TIMES, {D: 2})
    learning.observe("one", Stage.DIFFUSE, LARGE, 2, 1, 3 * step_seconds(LARGE, 2))
    assert learning.seconds("one", Stage.DIFFUSE, LARGE, 2) == pytest.approx(2 * step_seconds(LARGE, 2))
    with pytest.raises(ProfileError, match="2 workers hold the weights of diffuse together, 1 cannot run it"):
        TIMES.seconds("one", Stage.DIFFUSE, LARGE, 1)


def wide_decode_times() -> CostModel:
    """C at degree 2 is 1.9 times as fast."""
    whole = table()
    wide = [
        row("one", Stage.DECODE, entry.shape, 2, entry.seconds / 1.9, entry.peak_bytes)
        for entry in whole.rows
        if entry.model == "one" and entry.stage is Stage.DECODE
    ]
    return CostModel([replace(whole, rows=(*whole.rows, *wide))], "gpu")


def test_c_takes_its_optimal_degree_where_aligned_auxiliaries_are_idle() -> None:
    times = wide_decode_times()
    dispatcher = IlpDispatcher(times)
    big = 3000 * MIB
    for kinds, busy, decode in (
        ("ED C C C", [], ("n0w2", "n0w3")),  # places 1 and 2 are no pair
        ("ED C C C", [3], ("n0w1",)),
        ("ED C", [], ("n0w1",)),
    ):
        (assignment,) = decide(dispatcher, [request("r", SMALL)], node(kinds, busy=busy, memory_bytes=big), 0.0)
        assert assignment.decode == decode
        latents_s = times.transfer_seconds("one", Stage.DIFFUSE, SMALL)
        decode_s = times.seconds("one", Stage.DECODE, SMALL, len(decode))
        diffuse_s = times.seconds("one", Stage.ENCODE, SMALL) + 20 * times.seconds("one", Stage.DIFFUSE, SMALL)
        assert assignment.expected_finish_s == pytest.approx(diffuse_s + latents_s + decode_s)


def test_a_seat_is_busy_as_a_whole() -> None:
    times = wide_decode_times()
    views = node("C C C C", memory_bytes=3000 * MIB)
    snapshot = take_snapshot(views)
    auxiliaries = Auxiliaries(
        snapshot.all_pools, snapshot.node_of, MemoryCheck(times, DispatchOptions()), times, now_s=0.0
    )
    taken = [
        auxiliaries.take(auxiliaries.find_best("one", Stage.DECODE, SMALL, 1), 0.0, 2.0, "n0", C) for _ in range(3)
    ]
    assert taken == [(("n0w0", "n0w1"), 2.0), (("n0w2", "n0w3"), 2.0), (("n0w0", "n0w1"), 4.0)]
    assert auxiliaries.take(auxiliaries.find_able("one", Stage.DECODE, SMALL, 1), 0.0, 2.0, "n0", C) == (("n0w2",), 4.0)
    assert len(auxiliaries.find_best("one", Stage.DECODE, SMALL, 1)[0]) == 1  # n0w3 is free before any pair
