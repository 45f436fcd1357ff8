"""Planners with known answers, for tests of the core alone."""

from __future__ import annotations

from collections.abc import Sequence

from tridentserve.cluster import WorkerSpec
from tridentserve.plans import DispatchPlan, PlacementPlan, PlanMember, Replica, WorkerId
from tridentserve.protocols import Assignment, ClusterView, Decisions, LoadSource, WorkerView
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import PlacementType, Stage
from tridentserve.testing import MODEL

SECONDS = {Stage.ENCODE: 0.5, Stage.DIFFUSE: 1.0, Stage.DECODE: 2.0}


class FakeTimes:
    """The same times for all sizes; D scales perfectly. It records the reports that it gets."""

    def __init__(self) -> None:
        self.observed: list[tuple[Stage, int, float]] = []

    def seconds(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> float:
        return SECONDS[stage] / (degree if stage is Stage.DIFFUSE else 1)

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        return 1

    def weights_bytes(self, model: str, stage: Stage) -> int:
        return 1

    def unit(self, model: str, stage: Stage) -> int:
        return 1

    def output_bytes(self, model: str, stage: Stage, shape: Shape, batch: int = 1) -> int:
        return 1

    def transfer_seconds(self, model: str, stage: Stage, shape: Shape, batch: int = 1, same_node: bool = True) -> float:
        return 0.0

    def load_seconds(self, model: str, stage: Stage, source: LoadSource = "host") -> float:
        return 3.0

    def optimal_batch(self, model: str, stage: Stage, shape: Shape, degree: int = 1) -> int:
        return 1

    def degrees(self, model: str, stage: Stage) -> tuple[int, ...]:
        return (1, 2)

    def optimal_degree(self, model: str, stage: Stage, shape: Shape) -> int:
        return 2 if stage is Stage.DIFFUSE else 1

    def packed_seconds(self, model: str, shapes: Sequence[Shape]) -> float:
        return sum(self.seconds(model, Stage.DIFFUSE, shape) for shape in shapes)

    def observe(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int, seconds: float) -> None:
        self.observed.append((stage, degree, seconds))


class FixedDispatcher:
    """Sends every pending request to the same workers as soon as the primaries are idle."""

    def __init__(self, encode: str, diffuse: str, decode: str) -> None:
        self.encode, self.diffuse, self.decode = (tuple(names.split()) for names in (encode, diffuse, decode))
        self.why_not: str | None = None

    def decide(self, view: ClusterView) -> Decisions:
        idle = {worker.worker_id for worker in view.workers if worker.idle}
        if not view.pending or not idle.issuperset(self.diffuse):
            return Decisions()
        first = min(view.pending, key=lambda request: request.deadline_s)
        assignment = Assignment(
            request_ids=(first.spec.request_id,),
            primary=PlacementType.D,
            encode=self.encode,
            diffuse=self.diffuse,
            decode=self.decode,
            expected_finish_s=view.now_s,
            reason="fixed",
        )
        return Decisions([assignment])

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return self.why_not


def workers_of(types: dict[WorkerId, PlacementType]) -> tuple[list[WorkerSpec], PlacementPlan]:
    specs = [WorkerSpec(worker_id, "node", 100) for worker_id in types]
    replicas = {
        worker_id: frozenset(Replica(MODEL, stage) for stage in kind.stages) for worker_id, kind in types.items()
    }
    return specs, PlacementPlan(replicas)


def sole(plan: DispatchPlan) -> PlanMember:
    """The only member of a plan that is no batch."""
    (member,) = plan.members
    return member
