"""A simple policy for tests that does all a policy may do: degrees, batches, segments, preemption; and a replanner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.protocols import (
    Assignment,
    ClusterView,
    Decisions,
    PendingRequest,
    Preemption,
    RunningRequest,
    StageReport,
    WorkerView,
)
from tridentserve.requests import RequestSpec
from tridentserve.stages import PlacementType, Stage
from tridentserve.testing import MODEL


@dataclass(frozen=True, slots=True)
class Greedy:
    """By deadline. `degree` at most; `batch` requests together; `segment` steps of D at a time (None: all). With
    `preempts`, the running request with the latest deadline yields to one that waits and is due earlier. With `joins`,
    what finds no idle workers joins a running batch of its kind, beyond `batch`. With `goes_on`, the others of a batch
    go on when some end."""

    degree: int = 2
    batch: int = 1
    segment: int | None = None
    preempts: bool = False
    joins: bool = False
    goes_on: bool = False

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return None if any(_holds(worker, Stage.DIFFUSE) for worker in workers) else "no worker holds D"

    def decide(self, view: ClusterView) -> Decisions:
        idle = {worker.worker_id: worker for worker in view.workers if worker.idle and _holds(worker, Stage.DIFFUSE)}
        waiting = sorted(view.pending, key=lambda request: (request.deadline_s, request.spec.request_id))
        assignments = []
        while waiting and idle:
            members = [other for other in waiting if _alike(other, waiting[0])][: self.batch]
            first = next(iter(idle.values()))
            node = [name for name, worker in idle.items() if worker.node_id == first.node_id]
            degree = max(k for k in (1, 2, 4) if k <= min(self.degree, len(node)))
            diffuse = tuple(node[:degree])
            assignments.append(self._assignment(view, members, idle[diffuse[0]], diffuse))
            waiting = [request for request in waiting if request not in members]
            for worker_id in diffuse:
                del idle[worker_id]
        takeovers = self._join(view, waiting) if self.joins else []
        preemptions = _preemptions(view, waiting) if self.preempts and waiting and not takeovers else ()
        return Decisions([*assignments, *takeovers], preemptions)

    def _join(self, view: ClusterView, waiting: list[PendingRequest]) -> list[Assignment]:
        """Each batch is joined by the first of its kind that waits."""
        batches: dict[tuple[WorkerId, ...], list[RunningRequest]] = {}
        for running in view.running:
            batches.setdefault(running.diffuse, []).append(running)
        workers = {worker.worker_id: worker for worker in view.workers}
        takeovers = []
        for diffuse, members in batches.items():
            kind = members[0].spec.shape, members[0].spec.batch_key
            joining = [one for one in waiting if (one.spec.shape, one.spec.batch_key) == kind][:1]
            leader = workers.get(diffuse[0])
            if any(member.yielding for member in members) or not joining or leader is None:
                continue
            waiting.remove(joining[0])
            made = self._assignment(view, joining, leader, diffuse)
            names = (*(member.spec.request_id for member in members), *made.request_ids)
            takeovers.append(replace(made, request_ids=names, num_steps=None, takes_over=True))
        return takeovers

    def _assignment(
        self, view: ClusterView, members: list[PendingRequest], leader: WorkerView, diffuse: tuple[WorkerId, ...]
    ) -> Assignment:
        encoded = all(member.encoded for member in members)
        encode = () if encoded else _place(view, Stage.ENCODE, leader, diffuse)
        decode = _place(view, Stage.DECODE, leader, diffuse[:1])
        names = tuple(member.spec.request_id for member in members)
        kind = PlacementType.of(replica.stage for replica in leader.replicas) or PlacementType.D
        return Assignment(
            request_ids=names,
            primary=kind,
            encode=encode,
            diffuse=diffuse,
            decode=decode,
            expected_finish_s=view.now_s,
            reason="first idle, greedy",
            num_steps=self.segment,
            goes_on=self.goes_on,
        )


def _preemptions(view: ClusterView, waiting: list[PendingRequest]) -> list[Preemption]:
    """The batch that is due last yields to the first waiting request, if that is due before the whole batch.

    If one later member were enough, two batches could preempt each other at every tick."""
    due_s: dict[tuple[WorkerId, ...], float] = {}
    for running in view.running:
        due_s[running.diffuse] = min(running.deadline_s, due_s.get(running.diffuse, math.inf))
    latest = max(view.running, key=lambda running: (due_s[running.diffuse], running.spec.request_id), default=None)
    if latest is None or latest.yielding or due_s[latest.diffuse] <= waiting[0].deadline_s:
        return []
    return [Preemption(latest.spec.request_id, "another is due earlier")]


def _alike(one: PendingRequest, other: PendingRequest) -> bool:
    return _kind(one) == _kind(other)


def _kind(request: PendingRequest) -> tuple[object, ...]:
    return request.encoded, request.spec.shape, request.steps_done, request.spec.batch_key


def _holds(worker: WorkerView, stage: Stage) -> bool:
    return Replica(MODEL, stage) in worker.replicas


def _place(
    view: ClusterView, stage: Stage, leader: WorkerView, with_leader: tuple[WorkerId, ...]
) -> tuple[WorkerId, ...]:
    if _holds(leader, stage):
        return with_leader
    holders = [worker for worker in view.workers if _holds(worker, stage)]
    if not holders:
        return with_leader  # it loads the stage
    return (min(holders, key=lambda worker: (worker.free_at_s, worker.worker_id)).worker_id,)


class Alternating:
    """Proposes one placement after the other, every `period_s`."""

    def __init__(self, plans: Sequence[PlacementPlan], period_s: float) -> None:
        self._plans = plans
        self._period_s = period_s
        self._switches = 0

    def arrived(self, spec: RequestSpec, now_s: float) -> None:
        pass

    def stage_finished(self, report: StageReport) -> None:
        pass

    def expect(self, model: str, load: Sequence[LoadShare], window_s: float | None) -> None:
        pass

    def forget(self, model: str) -> None:
        pass

    def propose(self, workers: Sequence[WorkerSpec], placement: PlacementPlan, now_s: float) -> PlacementPlan | None:
        if now_s < (self._switches + 1) * self._period_s:
            return None
        self._switches += 1
        return self._plans[self._switches % len(self._plans)]
