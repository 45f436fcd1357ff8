"""Changes from one placement to the next: each worker takes the part of the new plan with which the fewest bytes move.

TridentServe, arXiv 2510.02838, section 5.3: a switch costs what the weights that have to be loaded weigh.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import networkx

from profiler.memory import find_largest_unit, sum_weights_bytes
from tridentserve.cluster import WorkerSpec
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.protocols import StageTimes

_Held = frozenset[Replica]
# The replicas that the workers of a block of places hold, in this order; a block is one worker where no weights
# are divided.
_Block = tuple[tuple[Replica, ...], ...]
# The contents of the blocks of a node, without saying which block has which.
_Layout = tuple[tuple[_Block, int], ...]
# The cost between blocks that differ in size: more than all weights that there are.
_NEVER = 1 << 80


def count_moved_bytes(
    plan: PlacementPlan, current: PlacementPlan, workers: Sequence[WorkerSpec], times: StageTimes
) -> dict[WorkerId, int]:
    """Bytes of weights that each worker has to load for `plan` when it holds what `current` says."""
    return {
        worker.worker_id: sum_weights_bytes(
            times, _find_held(plan, worker.worker_id) - _find_held(current, worker.worker_id)
        )
        for worker in workers
    }


def align(
    plan: PlacementPlan, current: PlacementPlan, workers: Sequence[WorkerSpec], times: StageTimes
) -> PlacementPlan:
    """The same plan with its parts given to other workers, such that the fewest bytes move (min-cost matching).

    What PackPerMachine put into one node stays in one node: whole nodes change places with nodes of the same size and
    devices, and workers within their node. Where workers hold a stage's weights together (`StageTimes.unit`), whole
    blocks of places change places, so that units stay aligned and every worker keeps its shard's number. Of equal
    workers and equal nodes only the number counts, which makes it fast for thousands. Workers are taken to have the
    memory that the plan was made for.
    """
    kinds = {*plan.replicas.values(), *current.replicas.values()}
    unit = max((find_largest_unit(times, held) for held in kinds), default=1)
    nodes = _build_nodes(plan, current, workers, unit)
    replicas: dict[WorkerId, _Held] = {}
    by_build: defaultdict[tuple[tuple[int, str, int], ...], list[_Node]] = defaultdict(list)
    for node in nodes:
        by_build[node.build].append(node)
    bytes_between = _BytesToLoad(times)
    for alike in by_build.values():
        for node, wanted in _match_nodes(alike, bytes_between):
            replicas |= _match_blocks(node, wanted, bytes_between)
    return replace(plan, replicas={worker.worker_id: replicas[worker.worker_id] for worker in workers})


@dataclass(frozen=True, slots=True)
class _Node:
    """A node: its devices (with their places where blocks have several), what each of its blocks holds now, and what is
    wanted there. Both in the same order."""

    build: tuple[tuple[int, str, int], ...]
    held: tuple[tuple[tuple[WorkerId, ...], _Block], ...]
    wanted: tuple[_Block, ...]


class _BytesToLoad:
    """Bytes to load, remembered: most workers and most nodes are alike."""

    def __init__(self, times: StageTimes) -> None:
        self._times = times
        self._workers: dict[tuple[tuple[Replica, ...], tuple[Replica, ...]], int] = {}
        self._blocks: dict[tuple[_Block, _Block], tuple[int, list[int]]] = {}
        self._nodes: dict[tuple[_Layout, _Layout], tuple[int, list[list[int]]]] = {}

    def count_for_worker(self, held: tuple[Replica, ...], wanted: tuple[Replica, ...]) -> int:
        if (held, wanted) not in self._workers:
            self._workers[held, wanted] = sum_weights_bytes(self._times, set(wanted) - set(held))
        return self._workers[held, wanted]

    def match_block(self, held: _Block, wanted: _Block) -> tuple[int, list[int]]:
        """The fewest bytes from one block to another, and which part of `wanted` each worker takes: its own where
        weights are divided, any where none are."""
        if len(held) == len(wanted) == 1:
            return self.count_for_worker(held[0], wanted[0]), [0]
        if len(held) != len(wanted):
            return _NEVER, []
        if (held, wanted) not in self._blocks:
            cost = [[self.count_for_worker(before, after) for after in wanted] for before in held]
            taken = list(range(len(held)))
            if all(find_largest_unit(self._times, replicas) == 1 for replicas in wanted):
                taken = [row.index(1) for row in solve_transport([1] * len(held), [1] * len(held), cost)]
            self._blocks[held, wanted] = sum(cost[i][j] for i, j in enumerate(taken)), taken
        return self._blocks[held, wanted]

    def match_layout(self, held: _Layout, wanted: _Layout) -> tuple[int, list[list[int]]]:
        """The fewest bytes from one layout to another, and how many blocks go from each part to each."""
        if (held, wanted) not in self._nodes:
            cost = [[self.match_block(before, after)[0] for after, _ in wanted] for before, _ in held]
            flow = solve_transport([n for _, n in held], [n for _, n in wanted], cost)
            total = sum(n * cost[i][j] for i, row in enumerate(flow) for j, n in enumerate(row))
            self._nodes[held, wanted] = total, flow
        return self._nodes[held, wanted]


def _match_nodes(nodes: Sequence[_Node], costs: _BytesToLoad) -> list[tuple[_Node, tuple[_Block, ...]]]:
    """Each node with the contents it takes."""
    now: defaultdict[_Layout, list[_Node]] = defaultdict(list)
    then: defaultdict[_Layout, list[tuple[_Block, ...]]] = defaultdict(list)
    for node in nodes:
        now[_count_blocks(block for _, block in node.held)].append(node)
        then[_count_blocks(node.wanted)].append(node.wanted)
    befores, afters = sorted(now), sorted(then)
    cost = [[costs.match_layout(before, after)[0] for after in afters] for before in befores]
    flow = solve_transport([len(now[before]) for before in befores], [len(then[after]) for after in afters], cost)
    return [
        (now[before].pop(0), then[after].pop(0))
        for i, before in enumerate(befores)
        for j, after in enumerate(afters)
        for _ in range(flow[i][j])
    ]


def _match_blocks(node: _Node, wanted: Sequence[_Block], costs: _BytesToLoad) -> dict[WorkerId, _Held]:
    """The replicas that each worker of a node takes from the contents of one."""
    before, after = _count_blocks(block for _, block in node.held), _count_blocks(wanted)
    _, flow = costs.match_layout(before, after)
    waiting: defaultdict[_Block, list[tuple[WorkerId, ...]]] = defaultdict(list)
    for worker_ids, held in node.held:
        waiting[held].append(worker_ids)
    taken: dict[WorkerId, _Held] = {}
    for i, (kind, _) in enumerate(before):
        for j, (block, _) in enumerate(after):
            for _ in range(flow[i][j]):
                parts = costs.match_block(kind, block)[1]
                ids = waiting[kind].pop(0)
                taken |= {worker_id: frozenset(block[part]) for worker_id, part in zip(ids, parts, strict=True)}
    return taken


def _build_nodes(plan: PlacementPlan, current: PlacementPlan, workers: Sequence[WorkerSpec], unit: int) -> list[_Node]:
    """The nodes, with blocks of `unit` places that are aligned to it."""
    by_node: defaultdict[str, list[WorkerSpec]] = defaultdict(list)
    for worker in sorted(workers, key=lambda worker: (worker.node_id, worker.worker_id)):
        by_node[worker.node_id].append(worker)
    nodes = []
    for members in by_node.values():
        blocks: list[list[WorkerSpec]] = [[worker] for worker in members]
        if unit > 1:
            members.sort(key=lambda worker: worker.place)
            blocks = [list(block) for _, block in groupby(members, key=lambda worker: worker.place // unit)]
        build = [(worker.memory_bytes, worker.device, worker.place if unit > 1 else 0) for worker in members]
        held = [(tuple(worker.worker_id for worker in block), _list_contents(current, block)) for block in blocks]
        nodes.append(_Node(tuple(sorted(build)), tuple(held), tuple(_list_contents(plan, block) for block in blocks)))
    return nodes


def _list_contents(plan: PlacementPlan, block: Iterable[WorkerSpec]) -> _Block:
    return tuple(tuple(sorted(_find_held(plan, worker.worker_id))) for worker in block)


def _count_blocks(blocks: Iterable[_Block]) -> _Layout:
    return tuple(sorted(Counter(blocks).items()))


def _find_held(plan: PlacementPlan, worker_id: WorkerId) -> _Held:
    return plan.replicas.get(worker_id, frozenset())


def solve_transport(supply: Sequence[int], demand: Sequence[int], cost: Sequence[Sequence[int]]) -> list[list[int]]:
    """The transportation problem: `flow[i][j]` units from source i to sink j, of least total cost, in whole numbers.
    Exact. Raises `ValueError` when supply and demand differ."""
    if sum(supply) != sum(demand):
        raise ValueError(f"{sum(supply)} supplied and {sum(demand)} demanded")
    graph = networkx.DiGraph()
    sinks = range(len(supply), len(supply) + len(demand))
    graph.add_nodes_from((source, {"demand": -units}) for source, units in enumerate(supply))
    graph.add_nodes_from((sink, {"demand": units}) for sink, units in zip(sinks, demand, strict=True))
    graph.add_weighted_edges_from(
        (source, sink, each) for source, row in enumerate(cost) for sink, each in zip(sinks, row, strict=True)
    )
    flow = networkx.network_simplex(graph)[1]
    return [[flow[source][sink] for sink in sinks] for source in range(len(supply))]
