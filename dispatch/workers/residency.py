"""Adjust-on-Dispatch (TridentServe, arXiv 2510.02838, section 5.1): replicas that a worker's placement has and its
memory does not have yet are loaded by the first plan that needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

from dispatch.workers.pools import Pool
from tridentserve.plans import Replica
from tridentserve.protocols import StageTimes, WorkerView
from tridentserve.stages import Stage


class LoadTimes:
    """The seconds until workers of a pool have some stages of a model in memory. They load side by side; a unit has the
    stages when the last of its workers has them."""

    def __init__(self, pool: Pool, model: str, stages: Iterable[Stage], times: StageTimes) -> None:
        self._pool = pool
        self._missing_s = _MissingSeconds(model, stages, times)

    def find_least_s(self, degree: int) -> float:
        """Seconds until `degree` workers of one node have the stages, those that lack the least: idle ones where a node
        has as many, else any. Infinity when no node has as many."""
        units = degree // self._pool.unit
        idle_s = [node[units - 1] for node in self._idle_s if len(node) >= units]
        return min(idle_s or [node[units - 1] for node in self._all_s if len(node) >= units], default=float("inf"))

    @cached_property
    def _idle_s(self) -> list[list[float]]:
        """The seconds of the idle units of each node, ascending."""
        if self._pool.unit == 1:
            missing_s = self._missing_s
            return [sorted([missing_s[worker.resident] for worker in node if worker.idle]) for node in self._pool.nodes]
        return self._list_seconds(lambda unit: all(worker.idle for worker in unit))

    @cached_property
    def _all_s(self) -> list[list[float]]:
        """The seconds of all units of each node, ascending."""
        return self._list_seconds(lambda unit: True)

    def _list_seconds(self, is_asked_for: Callable[[tuple[WorkerView, ...]], bool]) -> list[list[float]]:
        return [
            sorted(
                max(self._missing_s[worker.resident] for worker in unit)
                for unit in self._pool.list_units(node)
                if is_asked_for(unit)
            )
            for node in self._pool.nodes
        ]


class _MissingSeconds(dict[frozenset[Replica] | None, float]):
    """The time to load what a worker lacks, by what it has: there are few such sets, and many workers."""

    def __init__(self, model: str, stages: Iterable[Stage], times: StageTimes) -> None:
        self._load_s = {Replica(model, stage): times.load_seconds(model, stage) for stage in stages}

    def __missing__(self, resident: frozenset[Replica] | None) -> float:
        missing = () if resident is None else [replica for replica in self._load_s if replica not in resident]
        seconds = self[resident] = sum((self._load_s[replica] for replica in missing), start=0.0)
        return seconds
