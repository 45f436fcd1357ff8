"""The scheduler's view of its workers: which are alive, what each has been given, and when it will be free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tridentserve.cluster import WorkerSpec
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica, WorkerId
from tridentserve.protocols import WorkerView
from tridentserve.scheduling.estimation.hot_groups import group_name
from tridentserve.stages import PlacementType

WorkerKind = tuple[frozenset[Replica], int]


@dataclass(slots=True)
class _Queued:
    """A plan that a worker has been given. `started_s` is known for the head of the queue only."""

    expected_s: float
    started_s: float | None = None


@dataclass(slots=True)
class _Worker:
    spec: WorkerSpec
    replicas: frozenset[Replica]
    resident: frozenset[Replica]
    alive: bool = False
    aside: bool = False
    incarnation: int = 0
    queue: dict[int, _Queued] = field(default_factory=dict)
    reserved_by: int | None = None
    reserved_until_s: float = 0.0
    # Seconds of work that comes when a run's D has ended, by run.
    promised_s: dict[int, float] = field(default_factory=dict)
    loras: frozenset[str] = frozenset()
    # The view that the dispatcher has of it; None when something has changed since it was made.
    view: WorkerView | None = None

    @property
    def takes_plans(self) -> bool:
        """It is alive and has not been set aside."""
        return self.alive and not self.aside

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is reserved there."""
        return not self.queue and self.reserved_by is None

    def free_at_s(self) -> float:
        """The time at which all that it has been given is expected to end; 0 when that is nothing. An overdue plan
        counts as ended."""
        free_s = 0.0
        for queued in self.queue.values():
            free_s = max(free_s, queued.started_s or 0.0) + queued.expected_s
        if self.reserved_by is not None:
            free_s = max(free_s, self.reserved_until_s)
        return free_s + sum(self.promised_s.values())


class WorkerPool:
    """The workers of one service. Pure bookkeeping: it decides nothing."""

    def __init__(self, workers: Sequence[WorkerSpec], placement: PlacementPlan) -> None:
        self.placement = placement
        self._workers: dict[WorkerId, _Worker] = {}
        for spec in workers:
            held = placement.replicas.get(spec.worker_id, frozenset())
            self._workers[spec.worker_id] = _Worker(spec, held, resident=held)
        self._alive: tuple[WorkerSpec, ...] | None = None
        # Idle workers by kind; those that have changed since are looked at again before it is used.
        self._idle: defaultdict[WorkerKind, dict[WorkerId, None]] = defaultdict(dict)
        self._kinds: dict[WorkerId, WorkerKind] = {}
        self._changed: dict[WorkerId, None] = dict.fromkeys(self._workers)
        # The number of failures of each group of workers: a name is never used again after a failure.
        self._group_failures: dict[tuple[WorkerId, ...], int] = {}

    def join(self, spec: WorkerSpec, incarnation: int) -> None:
        worker = self._touch(spec.worker_id)
        worker.spec, worker.alive, worker.incarnation = spec, True, incarnation
        worker.resident = worker.replicas  # a worker starts with what its placement says
        worker.loras = frozenset()
        self._alive = None

    def lose(self, worker_id: WorkerId) -> None:
        """The worker is gone. Its plans stay in the ledger until the engine has reported each of them."""
        self._touch(worker_id).alive = False
        self._alive = None

    def set_aside(self, worker_id: WorkerId, aside: bool) -> None:
        """The worker is given no plans from now on that others can run, or is given plans again."""
        self._touch(worker_id).aside = aside

    def place(self, placement: PlacementPlan) -> None:
        """Another placement is in force. What workers have in memory changes later, as plans need it."""
        self.placement = placement
        for worker_id in self._workers:
            self._touch(worker_id).replicas = placement.replicas.get(worker_id, frozenset())

    def note_load(self, worker_id: WorkerId, replica: Replica, evicted: Iterable[Replica]) -> None:
        """A worker has made a replica resident, and others not."""
        worker = self._touch(worker_id)
        worker.resident = worker.resident.difference(evicted) | {replica}

    def note_loras(self, worker_id: WorkerId, loras: Iterable[str]) -> None:
        """A worker holds these LoRAs and no others."""
        self._touch(worker_id).loras = frozenset(loras)

    def unload(self, model: str) -> None:
        """All workers drop what they have in memory of a model."""
        for worker_id in self._workers:
            worker = self._touch(worker_id)
            worker.resident = frozenset(replica for replica in worker.resident if replica.model != model)
            worker.loras = frozenset(key for key in worker.loras if not key.startswith(f"{model}:"))

    def list_live(self) -> tuple[WorkerSpec, ...]:
        """The live workers; the same object until one joins or is lost."""
        if self._alive is None:
            self._alive = tuple(worker.spec for worker in self._workers.values() if worker.alive)
        return self._alive

    def all_alive(self, worker_ids: Iterable[WorkerId]) -> bool:
        return all(self._workers[worker_id].alive for worker_id in worker_ids)

    def any_aside(self, worker_ids: Iterable[WorkerId]) -> bool:
        return any(self._workers[worker_id].aside for worker_id in worker_ids)

    def is_replaceable(self, worker_id: WorkerId) -> bool:
        """True when all that a worker is meant to hold is held by others that are alive and have not been set aside."""
        others = [worker for other, worker in self._workers.items() if other != worker_id and worker.takes_plans]
        held = {replica for worker in others for replica in worker.replicas}
        return bool(others) and self._workers[worker_id].replicas <= held

    def node_of(self, worker_id: WorkerId) -> str:
        return self._workers[worker_id].spec.node_id

    def holds(self, worker_id: WorkerId, replica: Replica) -> bool:
        """True when a worker's placement has a replica."""
        return replica in self._workers[worker_id].replicas

    def list_missing(self, worker_id: WorkerId, replicas: Iterable[Replica]) -> list[Replica]:
        """Those of the replicas that the worker would have to load first."""
        resident = self._workers[worker_id].resident
        return [replica for replica in replicas if replica not in resident]

    def kind_of(self, worker_id: WorkerId, model: str) -> PlacementType | None:
        """The placement type of a worker for one model."""
        held = self._workers[worker_id].replicas
        return PlacementType.of(replica.stage for replica in held if replica.model == model)

    def kind(self, worker_id: WorkerId) -> WorkerKind:
        """A worker's placement and memory: a plan that fits there fits on all workers of its kind."""
        worker = self._workers[worker_id]
        return worker.replicas, worker.spec.memory_bytes

    def list_idle(self, kind: WorkerKind) -> Collection[WorkerId]:
        """The live workers of a kind that have nothing to do and have not been set aside."""
        for worker_id in self._changed:
            worker = self._workers[worker_id]
            self._idle[self._kinds.pop(worker_id, kind)].pop(worker_id, None)
            if worker.takes_plans and worker.is_idle:
                self._kinds[worker_id] = self.kind(worker_id)
                self._idle[self._kinds[worker_id]][worker_id] = None
        self._changed.clear()
        return self._idle[kind].keys()

    def list_holders(self, replica: Replica, like: WorkerId, now_s: float) -> list[WorkerId]:
        """The live workers that hold a replica and have as much memory as worker `like`, those set aside only where
        there are no others: first those that hold least in addition to it, then those that are free first."""
        memory_bytes = self._workers[like].spec.memory_bytes
        holders = [
            (len(worker.replicas), self.free_at_s(worker_id, now_s), worker_id)
            for worker_id, worker in self._workers.items()
            if worker.alive and replica in worker.replicas and worker.spec.memory_bytes >= memory_bytes
        ]
        found = [worker_id for *_, worker_id in sorted(holders)]
        return [worker_id for worker_id in found if not self._workers[worker_id].aside] or found

    def list_blocks(self, worker_ids: Iterable[WorkerId], width: int) -> list[tuple[WorkerId, ...]]:
        """The aligned blocks of `width` places of a node that these workers fill: those whose last member comes first
        go first. Each in the order of places."""
        members: defaultdict[tuple[str, int], list[WorkerId]] = defaultdict(list)
        full = []
        for worker_id in worker_ids:
            spec = self._workers[worker_id].spec
            block = members[spec.node_id, spec.place // width]
            block.append(worker_id)
            if len(block) == width:
                full.append(tuple(sorted(block, key=lambda member: self._workers[member].spec.place)))
        return full

    def start(self, plan: DispatchPlan, expected_s: float, now_s: float) -> None:
        for worker_id in plan.workers:
            queue = self._touch(worker_id).queue
            queue[plan.plan_id] = _Queued(expected_s, started_s=None if queue else now_s)

    def end(self, plan: DispatchPlan, now_s: float) -> None:
        for worker_id in plan.workers:
            queue = self._touch(worker_id).queue
            queue.pop(plan.plan_id, None)
            head = next(iter(queue.values()), None)
            if head is not None and head.started_s is None:
                head.started_s = now_s

    def reserve(self, worker_ids: Iterable[WorkerId], run_id: int, until_s: float) -> None:
        """Keep primaries for a run until its D has ended, which is expected at `until_s`."""
        for worker_id in worker_ids:
            worker = self._touch(worker_id)
            worker.reserved_by, worker.reserved_until_s = run_id, until_s

    def promise(self, worker_ids: Iterable[WorkerId], run_id: int, seconds: float) -> None:
        """Count work that is due on these workers once the run's D has ended."""
        for worker_id in worker_ids:
            self._touch(worker_id).promised_s[run_id] = seconds

    def free(self, worker_ids: Iterable[WorkerId], run_id: int) -> None:
        """Drop the reservations of a run on these workers."""
        for worker_id in worker_ids:
            worker = self._touch(worker_id)
            if worker.reserved_by == run_id:
                worker.reserved_by = None

    def release(self, worker_ids: Iterable[WorkerId], run_id: int) -> None:
        """Drop the reservations and promises of a run on these workers."""
        self.free(worker_ids, run_id)
        for worker_id in worker_ids:
            self._touch(worker_id).promised_s.pop(run_id, None)

    def free_at_s(self, worker_id: WorkerId, now_s: float) -> float:
        return max(now_s, self._workers[worker_id].free_at_s())

    def list_views(self) -> list[WorkerView]:
        """The live workers that have not been set aside, as the dispatcher sees them. A view is the same object until
        its worker changes."""
        return [worker.view or self._make_view(worker) for worker in self._workers.values() if worker.takes_plans]

    def list_given_plans(self, worker_id: WorkerId) -> list[tuple[int, float, float]]:
        """The plans that a worker has, in their order: id, and the times at which each is expected to begin and end."""
        found, free_s = [], 0.0
        for plan_id, queued in self._workers[worker_id].queue.items():
            start_s = max(free_s, queued.started_s or 0.0)
            free_s = start_s + queued.expected_s
            found.append((plan_id, start_s, free_s))
        return found

    def find_start_s(self, plan: DispatchPlan, now_s: float) -> float:
        """The time at which a plan that workers have been given is expected to begin, or has begun."""
        starts_s = (start_s for plan_id, start_s, _ in self.list_given_plans(plan.leader) if plan_id == plan.plan_id)
        return max(now_s, next(starts_s, now_s))

    def reserved_until_s(self, worker_id: WorkerId) -> float | None:
        """The expected end of the D for which a worker is kept free; None where it is not."""
        worker = self._workers[worker_id]
        return worker.reserved_until_s if worker.reserved_by is not None and not worker.queue else None

    def list_all(self) -> list[tuple[WorkerSpec, bool]]:
        """All workers of the service, and whether each is alive."""
        return [(worker.spec, worker.alive) for worker in self._workers.values()]

    def list_able_views(self, without: Collection[WorkerId]) -> list[WorkerView]:
        """The live workers but for some, as if nothing ran."""
        return [
            view
            for view in self.list_idle_views()
            if self._workers[view.worker_id].alive and view.worker_id not in without
        ]

    def list_idle_views(self) -> list[WorkerView]:
        """Every worker of the placement, lost ones too, as if nothing ran."""
        return [
            WorkerView(
                worker_id=worker_id,
                node_id=worker.spec.node_id,
                memory_bytes=worker.spec.memory_bytes,
                replicas=worker.replicas,
                idle=True,
                free_at_s=0.0,
                resident=worker.resident,
                place=worker.spec.place,
            )
            for worker_id, worker in self._workers.items()
        ]

    def group_name(self, worker_ids: tuple[WorkerId, ...]) -> str:
        """A name for the process group of these workers, the same until one of them restarts or the group fails."""
        members = [(worker_id, self._workers[worker_id].incarnation) for worker_id in worker_ids]
        return group_name(members, self._group_failures.get(worker_ids, 0))

    def break_group(self, worker_ids: tuple[WorkerId, ...]) -> None:
        """Never use the current group of these workers again."""
        self._group_failures[worker_ids] = self._group_failures.get(worker_ids, 0) + 1

    def _touch(self, worker_id: WorkerId) -> _Worker:
        """The worker, to be changed."""
        worker = self._workers[worker_id]
        worker.view = None
        self._changed[worker_id] = None
        return worker

    @staticmethod
    def _make_view(worker: _Worker) -> WorkerView:
        worker.view = WorkerView(
            worker_id=worker.spec.worker_id,
            node_id=worker.spec.node_id,
            memory_bytes=worker.spec.memory_bytes,
            replicas=worker.replicas,
            idle=worker.is_idle,
            free_at_s=worker.free_at_s(),
            resident=worker.resident,
            place=worker.spec.place,
            promised_s=sum(worker.promised_s.values()),
            loras=worker.loras,
        )
        return worker.view
