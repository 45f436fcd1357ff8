"""One scene for both engines: a worker is killed while it denoises; the request resumes from its state checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from tridentserve.cluster import WorkerSpec
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica
from tridentserve.protocols import Assignment, ClusterView, Decisions, PendingRequest, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry
from tridentserve.scheduling.scheduler import Scheduler, SchedulerOptions
from tridentserve.stages import PlacementType, Stage
from tridentserve.testing import MODEL, FixedTimes

STEPS, EVERY = 120, 20
NODES = {"w0": "n0", "w1": "n0", "w2": "n1", "w3": "n1"}


class ThenWider:
    """Whole requests on the first idle worker; those that resume run at the degree that ends their id."""

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return None

    def decide(self, view: ClusterView) -> Decisions:
        idle = {worker.worker_id: worker.node_id for worker in view.workers if worker.idle}
        for request in view.pending:
            degree = _degree(request)
            for node in sorted(set(idle.values())):
                workers = tuple(worker_id for worker_id in sorted(idle) if idle[worker_id] == node)[:degree]
                if len(workers) == degree:
                    encode = () if request.encoded else workers
                    name = request.spec.request_id
                    one = Assignment((name,), PlacementType.EDC, encode, workers, workers[:1], view.now_s, "scene")
                    return Decisions([one])
        return Decisions()


def _degree(request: PendingRequest) -> int:
    return int(request.spec.request_id.partition("~")[0][-1]) if request.steps_done else 1


def specs_of(memory_bytes: int) -> list[WorkerSpec]:
    return [WorkerSpec(worker_id, node, memory_bytes) for worker_id, node in NODES.items()]


def placement() -> PlacementPlan:
    return PlacementPlan({worker_id: frozenset(Replica(MODEL, stage) for stage in Stage) for worker_id in NODES})


def scheduler(memory_bytes: int) -> Scheduler:
    options = SchedulerOptions(checkpoint_s=1.0, checkpoint_steps=EVERY)
    return Scheduler(specs_of(memory_bytes), placement(), FixedTimes(), ThenWider(), options)


def check(decisions: Sequence[LogEntry], name: str, degree: int) -> int:
    """A request's decisions are those of a recovery at this degree; returns the step from which it resumed."""
    effects = [effect for decision in decisions for effect in decision.effects]
    plans = [effect.plan for effect in effects if isinstance(effect, ev.RunPlan) and _is_of(effect.plan, name)]
    first, *_ = plans
    assert first.stages == tuple(Stage)
    assert first.saves is not None
    assert NODES[first.saves.keeper] != NODES[first.leader]
    saved = [
        e.event.num_steps
        for e in decisions
        if isinstance(e.event, ev.CheckpointSaved) and e.event.plan_id == first.plan_id
    ]
    assert saved
    assert all(steps % EVERY == 0 for steps in saved)
    (again,) = [e for e in effects if isinstance(e, ev.Requeue) and e.request_id.partition("~")[0] == name]
    assert again.steps_done == saved[-1]
    rest = plans[1]
    (member,) = rest.members
    assert (member.steps, member.from_checkpoint, member.source) == ((saved[-1], STEPS), True, first.saves.keeper)
    assert rest.degree == degree
    assert first.leader not in rest.workers
    assert [plan for plan in plans if Stage.ENCODE in plan.stages] == [first], "its condition is part of the copy"
    assert any(isinstance(e, ev.Finish) and e.request_id.partition("~")[0] == name for e in effects)
    return again.steps_done


def _is_of(plan: DispatchPlan, name: str) -> bool:
    return plan.members[0].request_id.partition("~")[0] == name
