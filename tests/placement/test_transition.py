"""From plan to plan: the fewest bytes, nodes stay whole, equal to brute force on small cases, fast on large ones."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import align, count_moved_bytes
from placement.transition import solve_transport
from tests.profiler.synthetic import WEIGHTS_BYTES, cost_model
from tests.support.work import calls_in
from tridentserve.cluster import WorkerSpec
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.stages import PlacementType, Stage

TIMES = cost_model()
Held = frozenset[Replica]
Case = tuple[list[WorkerSpec], list[PlacementPlan]]


def of(kind: PlacementType, model: str = "one") -> Held:
    return frozenset(Replica(model, stage) for stage in kind.stages)


CONTENTS = [*(of(kind) for kind in PlacementType), of(PlacementType.D, "two"), frozenset[Replica]()]
contents = st.sampled_from(CONTENTS)


def cluster(sizes: tuple[int, ...]) -> list[WorkerSpec]:
    return [WorkerSpec(f"n{n}w{i}", f"n{n}", 1) for n, size in enumerate(sizes) for i in range(size)]


def total(plan: PlacementPlan, current: PlacementPlan, workers: list[WorkerSpec]) -> int:
    return sum(count_moved_bytes(plan, current, workers, TIMES).values())


def layouts(plan: PlacementPlan, workers: list[WorkerSpec]) -> Counter[tuple[tuple[Held, int], ...]]:
    """The number of nodes of each layout: which replicas their workers hold, and how many workers hold them."""
    nodes: dict[str, Counter[Held]] = {}
    for worker in workers:
        nodes.setdefault(worker.node_id, Counter())[plan.replicas[worker.worker_id]] += 1
    return Counter(tuple(sorted(node.items(), key=lambda item: sorted(item[0]))) for node in nodes.values())


@st.composite
def transitions(
    draw: st.DrawFn, sizes: st.SearchStrategy[tuple[int, ...]]
) -> tuple[list[WorkerSpec], list[PlacementPlan]]:
    workers = cluster(draw(sizes))
    plans = [PlacementPlan({w.worker_id: draw(contents) for w in workers}, "why", epoch) for epoch in (1, 2)]
    return workers, plans


def by_brute_force(plan: PlacementPlan, current: PlacementPlan, workers: list[WorkerSpec]) -> int:
    """The fewest bytes over all exchanges of nodes of one size, and of workers in each node."""
    nodes: dict[str, list[WorkerSpec]] = {}
    for worker in workers:
        nodes.setdefault(worker.node_id, []).append(worker)
    names, best = list(nodes), None

    def bytes_of(held: tuple[Held, ...], wanted: tuple[Held, ...]) -> int:
        return sum(WEIGHTS_BYTES[r.stage] for a, b in zip(held, wanted, strict=True) for r in b - a)

    for order in permutations(names):
        if any(len(nodes[a]) != len(nodes[b]) for a, b in zip(names, order, strict=True)):
            continue
        cost = 0
        for name, source in zip(names, order, strict=True):
            held = tuple(current.replicas[w.worker_id] for w in nodes[name])
            wanted = [plan.replicas[w.worker_id] for w in nodes[source]]
            cost += min(bytes_of(held, exchange) for exchange in permutations(wanted))
        best = cost if best is None else min(best, cost)
    assert best is not None
    return best


@settings(max_examples=60)
@given(transitions(st.sampled_from([(1,), (3,), (2, 2), (1, 2, 2), (3, 2), (2, 2, 2)])))
def test_it_equals_brute_force(case: Case) -> None:
    workers, (current, plan) = case
    assert total(align(plan, current, workers, TIMES), current, workers) == by_brute_force(plan, current, workers)


@given(transitions(st.lists(st.integers(1, 8), min_size=1, max_size=6).map(tuple)))
def test_nothing_changes_but_places_and_no_more_moves_than_without(
    case: Case,
) -> None:
    workers, (current, plan) = case
    aligned = align(plan, current, workers, TIMES)
    assert layouts(aligned, workers) == layouts(plan, workers)
    assert total(aligned, current, workers) <= total(plan, current, workers)
    assert (aligned.epoch, aligned.reason) == (plan.epoch, plan.reason)
    assert align(plan, current, list(reversed(workers)), TIMES).replicas == aligned.replicas
    assert total(align(current, current, workers, TIMES), current, workers) == 0


def test_new_workers_hold_nothing_and_lost_ones_do_not_count() -> None:
    workers = cluster((2,))
    current = PlacementPlan({"n0w1": of(PlacementType.D), "gone": of(PlacementType.E)})
    plan = PlacementPlan({"n0w0": of(PlacementType.D), "n0w1": of(PlacementType.C)})
    aligned = align(plan, current, workers, TIMES)
    assert aligned.replicas == {"n0w0": of(PlacementType.C), "n0w1": of(PlacementType.D)}
    assert count_moved_bytes(aligned, current, workers, TIMES) == {"n0w0": WEIGHTS_BYTES[Stage.DECODE], "n0w1": 0}


def test_the_work_grows_with_the_workers_not_with_their_square() -> None:
    """4,096 workers take the calls of 512 eight times, and some more where nodes of two kinds meet."""
    kinds = list(PlacementType)
    calls = []
    for num_nodes in (64, 512):
        workers = cluster((8,) * num_nodes)
        current = PlacementPlan({w.worker_id: of(kinds[i // (14 * num_nodes // 8)]) for i, w in enumerate(workers)})
        plan = PlacementPlan(
            {w.worker_id: of(kinds[-1 - (i + 5) // (11 * num_nodes // 8)]) for i, w in enumerate(workers)}
        )
        aligned = align(plan, current, workers, TIMES)
        assert total(aligned, current, workers) < total(plan, current, workers)
        calls.append(calls_in(partial(align, plan, current, workers, TIMES)))
    assert calls[1] < 10 * calls[0]


@given(st.data())
def test_transport_is_exact(data: st.DataObject) -> None:
    units = data.draw(st.integers(1, 5))
    sources = data.draw(st.lists(st.integers(0, 2), min_size=units, max_size=units))
    sinks = data.draw(st.lists(st.integers(0, 2), min_size=units, max_size=units))
    cost = [[data.draw(st.integers(0, 9)) for _ in range(3)] for _ in range(3)]
    supply, demand = [sources.count(i) for i in range(3)], [sinks.count(j) for j in range(3)]
    flow = solve_transport(supply, demand, cost)
    assert [sum(row) for row in flow] == supply
    assert [sum(column) for column in zip(*flow, strict=True)] == demand
    best = min(sum(cost[i][j] for i, j in zip(sources, order, strict=True)) for order in permutations(sinks))
    assert sum(flow[i][j] * cost[i][j] for i, j in product(range(3), range(3))) == best


def test_transport_refuses_what_does_not_balance() -> None:
    with pytest.raises(ValueError, match="2 supplied and 1 demanded"):
        solve_transport([2], [1], [[0]])
