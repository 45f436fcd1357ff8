"""A small engine for the step-level policies: it checks each decision and carries it out, one event after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dispatch import DispatchOptions
from profiler import CostModel
from profiler.cost_model import LARGEST_BATCH
from tests.profiler.synthetic import row, step_seconds, table
from tridentserve.plans import WorkerId
from tridentserve.protocols import (
    Assignment,
    ClusterView,
    Decisions,
    Dispatcher,
    PendingRequest,
    RunningRequest,
    WorkerView,
)
from tridentserve.requests import Shape
from tridentserve.stages import Stage

SMALL, MIDDLE, LARGE, HUGE = (Shape(side, side) for side in (256, 512, 1024, 2048))
VIDEO = Shape(384, 384, 17)


def batching_model() -> CostModel:
    """The synthetic profile, where small sizes gain from batches: T(b) = (0.4 + 0.6 b) T(1)."""
    whole = table(("one",))
    more = [
        row(
            "one",
            Stage.DIFFUSE,
            shape,
            k,
            (0.4 + 0.6 * b) * step_seconds(shape, k),
            b * int(1e5 * shape.tokens / k),
            batch=b,
        )
        for shape in (SMALL, MIDDLE)
        for k in (1, 2, 4)
        for b in (2, 4, 8)
    ]
    return CostModel([replace(whole, rows=(*whole.rows, *more))], device="gpu")


TIMES = batching_model()
# The options of policies that live on batches.
BATCHES = DispatchOptions(max_batch=LARGEST_BATCH)


def running(pending: PendingRequest, *diffuse: WorkerId, yielding: bool = False, batch: int = 1) -> RunningRequest:
    """A request in D on these workers."""
    return RunningRequest(
        pending.spec,
        pending.arrival_s,
        pending.deadline_s,
        Stage.DIFFUSE,
        diffuse,
        pending.steps_done,
        1e3,
        yielding,
        batch,
    )


def check(view: ClusterView, decisions: Decisions) -> None:
    """Check the properties that an engine requires of decisions."""
    pending = {request.spec.request_id: request for request in view.pending}
    workers = {worker.worker_id: worker for worker in view.workers}
    starts = [each for each in decisions.assignments if not each.takes_over]
    for each in decisions.assignments:
        if each.takes_over:
            check_takeover(view, each)
    running_ids = {each.spec.request_id for each in view.running}
    named = [name for each in decisions.assignments for name in each.request_ids if name not in running_ids]
    named += [refusal.request_id for refusal in decisions.refusals]
    assert len(named) == len(set(named))
    assert set(named) <= pending.keys()
    stopped = [preemption.request_id for preemption in decisions.preemptions]
    assert len(stopped) == len(set(stopped))
    assert set(stopped) <= {each.spec.request_id for each in view.running if not each.yielding}
    used = [worker_id for each in starts for worker_id in each.diffuse]
    assert len(used) == len(set(used))
    assert all(workers[worker_id].idle for worker_id in used)
    for each in starts:
        members = [pending[name] for name in each.request_ids]
        assert len({(member.spec.model, member.spec.shape, member.spec.batch_key) for member in members}) == 1
        assert len({workers[worker_id].node_id for worker_id in each.diffuse}) == 1
        fewest = min(member.spec.num_inference_steps - member.steps_done for member in members)
        assert each.num_steps is None or 0 < each.num_steps <= fewest
        assert bool(each.encode) == any(not member.encoded for member in members)
        assert bool(each.decode) == (each.num_steps is None or each.num_steps == fewest)
        held = {stage for worker_id in each.diffuse for stage in [r.stage for r in workers[worker_id].replicas]}
        assert set(each.primary.stages) == held
        assert each.encode in ((), each.diffuse) or Stage.ENCODE not in held
        assert each.decode in ((), each.diffuse[:1]) or Stage.DECODE not in held
        assert each.expected_finish_s >= view.now_s
        assert each.reason


def check_takeover(view: ClusterView, assignment: Assignment) -> None:
    """Check that an assignment is of one whole running batch and of some that wait."""
    active = {each.spec.request_id: each for each in view.running}
    staying = [active[name] for name in assignment.request_ids if name in active]
    joining = [each for each in view.pending if each.spec.request_id in assignment.request_ids]
    assert len(staying) + len(joining) == len(assignment.request_ids)
    assert joining
    assert {each.spec.request_id for each in staying} == {
        each.spec.request_id for each in view.running if each.diffuse == assignment.diffuse
    }
    assert not any(each.yielding for each in staying)
    specs = [*(each.spec for each in staying), *(each.spec for each in joining)]
    assert len({(spec.model, spec.shape, spec.batch_key) for spec in specs}) == 1
    assert assignment.encode in ((), assignment.diffuse)
    assert assignment.num_steps is None


@dataclass(slots=True)
class _Run:
    """D of a batch, or C of one request (`steps` 0)."""

    members: list[PendingRequest]
    workers: tuple[WorkerId, ...]
    first_step_s: float
    step_s: float
    steps: int
    yielding: bool = False
    joining: list[PendingRequest] = field(default_factory=list)
    """They continue with the members from the end on."""

    @property
    def end_s(self) -> float:
        return self.first_step_s + self.steps * self.step_s

    def stop(self, now_s: float) -> None:
        done = math.ceil((now_s - self.first_step_s) / self.step_s - 1e-9)
        self.steps, self.yielding = min(self.steps, max(done, 1)), True


@dataclass
class StepEngine:
    """EDC workers. `finish_s`: when each request ended; `refused`: those given up."""

    policy: Dispatcher
    workers: Sequence[WorkerView]
    pending: dict[str, PendingRequest] = field(default_factory=dict)
    runs: list[_Run] = field(default_factory=list)
    finish_s: dict[str, float] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    log: list[tuple[float, Assignment]] = field(default_factory=list)

    def play(self, requests: Sequence[PendingRequest]) -> None:
        """Until all have ended. A policy that lets requests wait on an idle cluster fails."""
        coming = sorted(requests, key=lambda request: request.arrival_s)
        for _ in range(100_000):
            now_s = min([run.end_s for run in self.runs] + [request.arrival_s for request in coming[:1]], default=None)
            if now_s is None:
                assert not self.pending, f"{sorted(self.pending)} wait without end"
                return
            while coming and coming[0].arrival_s <= now_s:
                request = coming.pop(0)
                self.pending[request.spec.request_id] = request
            for run in [run for run in self.runs if run.end_s <= now_s]:
                self._end(run, now_s)
            if self.pending:
                self._tick(now_s)
        raise AssertionError("the policy makes no progress")

    def _end(self, run: _Run, now_s: float) -> None:
        self.runs.remove(run)
        together = list(run.joining)
        for member in run.members:
            left = member.spec.num_inference_steps - member.steps_done - run.steps
            if run.step_s == 0:
                self.finish_s[member.spec.request_id] = now_s
            elif left == 0:
                decode_s = TIMES.seconds("one", Stage.DECODE, member.spec.shape)
                self.runs.append(_Run([member], run.workers[:1], now_s + decode_s, 0.0, 0))
            else:
                stopped = replace(
                    member, steps_done=member.steps_done + run.steps, encoded=True, held_by=run.workers[0]
                )
                if run.joining:
                    together.append(stopped)
                else:
                    self.pending[member.spec.request_id] = stopped
        if together:
            self._begin(together, run.workers, now_s)

    def _begin(
        self, members: list[PendingRequest], workers: tuple[WorkerId, ...], now_s: float, num_steps: int | None = None
    ) -> None:
        fewest = min(member.spec.num_inference_steps - member.steps_done for member in members)
        step_s = TIMES.seconds("one", Stage.DIFFUSE, members[0].spec.shape, len(workers), len(members))
        start_s = now_s + (0.0 if all(member.encoded for member in members) else 0.02)
        self.runs.append(_Run(members, workers, start_s, step_s, num_steps or fewest))

    def view(self, now_s: float) -> ClusterView:
        busy = {worker_id: run.end_s for run in self.runs for worker_id in run.workers}
        workers = [
            replace(worker, idle=worker.worker_id not in busy, free_at_s=busy.get(worker.worker_id, 0.0))
            for worker in self.workers
        ]
        active = [
            RunningRequest(
                member.spec,
                member.arrival_s,
                member.deadline_s,
                Stage.DIFFUSE if run.step_s else Stage.DECODE,
                run.workers,
                member.steps_done + (max(0, int((now_s - run.first_step_s) / run.step_s)) if run.step_s else 0),
                run.end_s,
                run.yielding,
                len(run.members),
            )
            for run in self.runs
            for member in run.members
        ]
        return ClusterView(now_s, list(self.pending.values()), active, workers)

    def _tick(self, now_s: float) -> None:
        view = self.view(now_s)
        decisions = self.policy.decide(view)
        check(view, decisions)
        for refusal in decisions.refusals:
            self.refused.append(self.pending.pop(refusal.request_id).spec.request_id)
        for preemption in decisions.preemptions:
            self.preempted.append(preemption.request_id)
            next(run for run in self.runs if preemption.request_id in [m.spec.request_id for m in run.members]).stop(
                now_s
            )
        for each in decisions.assignments:
            self.log.append((now_s, each))
            members = [self.pending.pop(name) for name in each.request_ids if name in self.pending]
            if each.takes_over:
                run = next(run for run in self.runs if run.step_s and run.workers == each.diffuse)
                run.stop(now_s)
                run.joining = members
            else:
                self._begin(members, each.diffuse, now_s, each.num_steps)
