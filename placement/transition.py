"""From one placement to the next: which worker takes which part of the new plan, so that the fewest bytes move.

TridentServe, arXiv 2510.02838, section 5.3: a switch costs what the weights that have to be loaded weigh.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from placement.transport import transport
from profiler.memory import held_weights_bytes
from tridentserve.cluster import WorkerSpec
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.protocols import StageTimes

_Held = frozenset[Replica]
# What the workers of a node hold, without saying which holds what.
_Layout = tuple[tuple[tuple[Replica, ...], int], ...]


def moved_bytes(
    plan: PlacementPlan, current: PlacementPlan, workers: Sequence[WorkerSpec], times: StageTimes
) -> dict[WorkerId, int]:
    """Bytes of weights that each worker has to load for `plan` when it holds what `current` says."""
    return {
        worker.worker_id: held_weights_bytes(times, _held(plan, worker.worker_id) - _held(current, worker.worker_id))
        for worker in workers
    }


def align(
    plan: PlacementPlan, current: PlacementPlan, workers: Sequence[WorkerSpec], times: StageTimes
) -> PlacementPlan:
    """The same plan with its parts given to other workers, such that the fewest bytes move (min-cost matching).

    What PackPerMachine put into one node stays in one node: whole nodes change places with nodes of the same size and
    devices, and workers within their node. Of equal workers and equal nodes only the number counts, which makes it fast
    for thousands. Workers are taken to have the memory that the plan was made for.
    """
    nodes = _nodes(plan, current, workers)
    replicas: dict[WorkerId, _Held] = {}
    by_build: defaultdict[tuple[tuple[int, str], ...], list[_Node]] = defaultdict(list)
    for node in nodes:
        by_build[node.build].append(node)
    bytes_between = _Costs(times)
    for alike in by_build.values():
        for node, wanted in _match_nodes(alike, bytes_between):
            replicas |= _match_workers(node, wanted, bytes_between)
    return replace(plan, replicas={worker.worker_id: replicas[worker.worker_id] for worker in workers})


@dataclass(frozen=True, slots=True)
class _Node:
    """A node: its devices, what each of its workers holds now, and what is wanted there. Both in the order of ids."""

    build: tuple[tuple[int, str], ...]
    held: Mapping[WorkerId, _Held]
    wanted: tuple[_Held, ...]


class _Costs:
    """Bytes to load, remembered: most workers and most nodes are alike."""

    def __init__(self, times: StageTimes) -> None:
        self._times = times
        self._workers: dict[tuple[tuple[Replica, ...], tuple[Replica, ...]], int] = {}
        self._nodes: dict[tuple[_Layout, _Layout], tuple[int, list[list[int]]]] = {}

    def of_worker(self, held: tuple[Replica, ...], wanted: tuple[Replica, ...]) -> int:
        if (held, wanted) not in self._workers:
            self._workers[held, wanted] = held_weights_bytes(self._times, set(wanted) - set(held))
        return self._workers[held, wanted]

    def of_node(self, held: _Layout, wanted: _Layout) -> tuple[int, list[list[int]]]:
        """The fewest bytes from one layout to another, and how many workers go from each part to each."""
        if (held, wanted) not in self._nodes:
            cost = [[self.of_worker(before, after) for after, _ in wanted] for before, _ in held]
            flow = transport([n for _, n in held], [n for _, n in wanted], cost)
            total = sum(n * cost[i][j] for i, row in enumerate(flow) for j, n in enumerate(row))
            self._nodes[held, wanted] = total, flow
        return self._nodes[held, wanted]


def _match_nodes(nodes: Sequence[_Node], costs: _Costs) -> list[tuple[_Node, tuple[_Held, ...]]]:
    """Each node with the contents it takes."""
    now: defaultdict[_Layout, list[_Node]] = defaultdict(list)
    then: defaultdict[_Layout, list[tuple[_Held, ...]]] = defaultdict(list)
    for node in nodes:
        now[_layout(node.held.values())].append(node)
        then[_layout(node.wanted)].append(node.wanted)
    befores, afters = sorted(now), sorted(then)
    cost = [[costs.of_node(before, after)[0] for after in afters] for before in befores]
    flow = transport([len(now[before]) for before in befores], [len(then[after]) for after in afters], cost)
    return [
        (now[before].pop(0), then[after].pop(0))
        for i, before in enumerate(befores)
        for j, after in enumerate(afters)
        for _ in range(flow[i][j])
    ]


def _match_workers(node: _Node, wanted: Sequence[_Held], costs: _Costs) -> dict[WorkerId, _Held]:
    """What each worker of a node takes of the contents of one."""
    before, after = _layout(node.held.values()), _layout(wanted)
    _, flow = costs.of_node(before, after)
    waiting: defaultdict[tuple[Replica, ...], list[WorkerId]] = defaultdict(list)
    for worker_id, held in node.held.items():
        waiting[tuple(sorted(held))].append(worker_id)
    return {
        waiting[kind].pop(0): frozenset(taken)
        for i, (kind, _) in enumerate(before)
        for j, (taken, _) in enumerate(after)
        for _ in range(flow[i][j])
    }


def _nodes(plan: PlacementPlan, current: PlacementPlan, workers: Sequence[WorkerSpec]) -> list[_Node]:
    by_node: defaultdict[str, list[WorkerSpec]] = defaultdict(list)
    for worker in sorted(workers, key=lambda worker: (worker.node_id, worker.worker_id)):
        by_node[worker.node_id].append(worker)
    return [
        _Node(
            build=tuple(sorted((worker.memory_bytes, worker.device) for worker in members)),
            held={worker.worker_id: _held(current, worker.worker_id) for worker in members},
            wanted=tuple(_held(plan, worker.worker_id) for worker in members),
        )
        for members in by_node.values()
    ]


def _layout(contents: Iterable[_Held]) -> _Layout:
    return tuple(sorted(Counter(tuple(sorted(held)) for held in contents).items()))


def _held(plan: PlacementPlan, worker_id: WorkerId) -> _Held:
    return plan.replicas.get(worker_id, frozenset())
