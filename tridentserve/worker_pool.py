"""What the scheduler knows of its workers: who is alive, what each has been given, when it will be free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tridentserve.cluster import WorkerSpec
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica, WorkerId
from tridentserve.protocols import WorkerView


@dataclass(slots=True)
class _Queued:
    """A plan that a worker has been given. `started_s` is known for the head of the queue only."""

    expected_s: float
    started_s: float | None = None


@dataclass(slots=True)
class _Worker:
    spec: WorkerSpec
    replicas: frozenset[Replica]
    alive: bool = False
    incarnation: int = 0
    queue: dict[int, _Queued] = field(default_factory=dict)
    reserved_by: str | None = None
    reserved_until_s: float = 0.0
    # Seconds of work that comes when a request's D has ended, by request.
    promised_s: dict[str, float] = field(default_factory=dict)

    def free_at_s(self, now_s: float) -> float:
        """When the queue is expected to be empty; an overdue head counts as ending now."""
        free_s = now_s
        for queued in self.queue.values():
            begin_s = free_s if queued.started_s is None else queued.started_s
            free_s = max(free_s, begin_s + queued.expected_s)
        if self.reserved_by is not None:
            free_s = max(free_s, self.reserved_until_s)
        return free_s + sum(self.promised_s.values())


class WorkerPool:
    """The workers of one service. Pure bookkeeping: it decides nothing."""

    def __init__(self, workers: Sequence[WorkerSpec], placement: PlacementPlan) -> None:
        self._workers = {
            spec.worker_id: _Worker(spec, placement.replicas.get(spec.worker_id, frozenset())) for spec in workers
        }
        # How often a group of workers has failed: a name is never used again after a failure.
        self._group_failures: dict[tuple[WorkerId, ...], int] = {}

    def join(self, spec: WorkerSpec, incarnation: int) -> None:
        worker = self._workers[spec.worker_id]
        worker.spec, worker.alive, worker.incarnation = spec, True, incarnation

    def lose(self, worker_id: WorkerId) -> None:
        """The worker is gone. Its plans stay in the books until the engine has reported each of them."""
        self._workers[worker_id].alive = False

    def all_alive(self, worker_ids: Iterable[WorkerId]) -> bool:
        return all(self._workers[worker_id].alive for worker_id in worker_ids)

    def holders(self, replica: Replica, like: WorkerId) -> list[WorkerId]:
        """The live workers that hold a replica and have as much memory as worker `like`."""
        memory_bytes = self._workers[like].spec.memory_bytes
        return [
            worker_id
            for worker_id, worker in self._workers.items()
            if worker.alive and replica in worker.replicas and worker.spec.memory_bytes >= memory_bytes
        ]

    def start(self, plan: DispatchPlan, expected_s: float, now_s: float) -> None:
        for worker_id in plan.workers:
            queue = self._workers[worker_id].queue
            queue[plan.plan_id] = _Queued(expected_s, started_s=None if queue else now_s)

    def end(self, plan: DispatchPlan, now_s: float) -> None:
        for worker_id in plan.workers:
            queue = self._workers[worker_id].queue
            queue.pop(plan.plan_id, None)
            head = next(iter(queue.values()), None)
            if head is not None and head.started_s is None:
                head.started_s = now_s

    def reserve(self, worker_ids: Iterable[WorkerId], request_id: str, until_s: float) -> None:
        """Keep primaries for a request until its D has ended, which is expected at `until_s`."""
        for worker_id in worker_ids:
            worker = self._workers[worker_id]
            worker.reserved_by, worker.reserved_until_s = request_id, until_s

    def promise(self, worker_ids: Iterable[WorkerId], request_id: str, seconds: float) -> None:
        """Count work that is due on these workers once the request's D has ended."""
        for worker_id in worker_ids:
            self._workers[worker_id].promised_s[request_id] = seconds

    def release(self, request_id: str) -> None:
        """Drop the reservations and promises of a request."""
        for worker in self._workers.values():
            worker.promised_s.pop(request_id, None)
            if worker.reserved_by == request_id:
                worker.reserved_by = None

    def free_at_s(self, worker_id: WorkerId, now_s: float) -> float:
        return self._workers[worker_id].free_at_s(now_s)

    def views(self, now_s: float) -> list[WorkerView]:
        """The live workers, as the dispatcher sees them."""
        return [self._view(worker, now_s) for worker in self._workers.values() if worker.alive]

    def views_when_idle(self) -> list[WorkerView]:
        """Every worker of the placement, lost ones too, as if nothing ran."""
        return [
            WorkerView(
                worker_id=worker_id,
                node_id=worker.spec.node_id,
                memory_bytes=worker.spec.memory_bytes,
                replicas=worker.replicas,
                idle=True,
                free_at_s=0.0,
            )
            for worker_id, worker in self._workers.items()
        ]

    @staticmethod
    def _view(worker: _Worker, now_s: float) -> WorkerView:
        return WorkerView(
            worker_id=worker.spec.worker_id,
            node_id=worker.spec.node_id,
            memory_bytes=worker.spec.memory_bytes,
            replicas=worker.replicas,
            idle=not worker.queue and worker.reserved_by is None,
            free_at_s=worker.free_at_s(now_s),
        )

    def group_name(self, worker_ids: tuple[WorkerId, ...]) -> str:
        """A name for the process group of these workers, the same until one of them restarts or the group fails."""
        members = ",".join(f"{worker_id}#{self._workers[worker_id].incarnation}" for worker_id in worker_ids)
        return f"{members}/{self._group_failures.get(worker_ids, 0)}"

    def break_group(self, worker_ids: tuple[WorkerId, ...]) -> None:
        """Never use the current group of these workers again."""
        self._group_failures[worker_ids] = self._group_failures.get(worker_ids, 0) + 1
