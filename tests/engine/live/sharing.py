"""One scene for both engines: requests that come at once share E's forward pass; a lone one decodes on two workers, and
so does one that comes apart, when those two no longer hold D."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dispatch.dispatcher import IlpDispatcher
from dispatch.options import DispatchOptions
from tests.engine.simulated.greedy import Greedy
from tests.scheduling.fakes import FakeTimes
from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.plans import DispatchPlan, PlacementPlan, Replica
from tridentserve.protocols import ClusterView, Decisions, StageReport, WorkerView
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.stages import Stage
from tridentserve.testing import MODEL

TYPES = {"w0": (Stage.ENCODE,), "w1": (Stage.DIFFUSE, Stage.DECODE), "w2": (Stage.DIFFUSE, Stage.DECODE)}
TYPES["w3"] = TYPES["w2"]
LATER_TYPES = {"w0": (Stage.ENCODE,), "w1": (Stage.DIFFUSE,), "w2": (Stage.DECODE,), "w3": (Stage.DECODE,)}
MOST_AT_ONCE = 2
SMALL = Shape(96, 64)
# Larger than a tile, and decoded as it is, it takes more than any worker has.
LARGE, WHOLE_BYTES = Shape(528, 64), 1 << 40


class Times(FakeTimes):
    """E takes as long for two as for one; C on two workers takes half as long."""

    def seconds(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> float:
        alone_s = super().seconds(model, stage, shape)
        return alone_s if stage is Stage.ENCODE else alone_s / degree

    def optimal_batch(self, model: str, stage: Stage, shape: Shape, degree: int = 1) -> int:
        return MOST_AT_ONCE if stage is Stage.ENCODE else 1

    def degrees(self, model: str, stage: Stage) -> tuple[int, ...]:
        return (1,) if stage is Stage.ENCODE else (1, 2)

    def optimal_degree(self, model: str, stage: Stage, shape: Shape) -> int:
        return self.degrees(model, stage)[-1]

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        return WHOLE_BYTES if stage is Stage.DECODE and shape == LARGE else 1


class Scene:
    """`at-once` requests each on one worker, the others as the Dispatcher has it."""

    def __init__(self) -> None:
        self._greedy = Greedy(degree=1)
        self._ilp = IlpDispatcher(Times(), DispatchOptions(handoff_reserve_bytes=0, segment_s=1e9))

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return self._ilp.can_ever_run(spec, workers)

    def decide(self, view: ClusterView) -> Decisions:
        at_once = [request for request in view.pending if request.spec.request_id.startswith("at-once")]
        if at_once:
            return self._greedy.decide(replace(view, pending=at_once))
        return self._ilp.decide(view)


class OnceApart:
    """A `Replanner`: from the first request whose name begins with `apart`, D is on one worker and C on two others."""

    def __init__(self) -> None:
        self._is_due = False

    def arrived(self, spec: RequestSpec, now_s: float) -> None:
        self._is_due |= spec.request_id.startswith("apart")

    def stage_finished(self, report: StageReport) -> None:
        """Is not looked at."""

    def expect(self, model: str, load: Sequence[LoadShare], window_s: float | None) -> None:
        """Is not looked at."""

    def forget(self, model: str) -> None:
        """Is not looked at."""

    def propose(self, workers: Sequence[WorkerSpec], placement: PlacementPlan, now_s: float) -> PlacementPlan | None:
        if not self._is_due or placement.epoch:
            return None
        return replace(placement_of(LATER_TYPES), reason="D apart from C", epoch=1)


def specs_of(memory_bytes: int) -> list[WorkerSpec]:
    return [WorkerSpec(worker_id, "node", memory_bytes) for worker_id in TYPES]


def placement_of(types: Mapping[str, Sequence[Stage]]) -> PlacementPlan:
    return PlacementPlan({name: frozenset(Replica(MODEL, stage) for stage in stages) for name, stages in types.items()})


def placement() -> PlacementPlan:
    return placement_of(TYPES)


def scheduler(memory_bytes: int) -> Scheduler:
    return Scheduler(specs_of(memory_bytes), placement(), Times(), Scene(), replanner=OnceApart())


def plans_of_several(decisions: Sequence[LogEntry]) -> list[tuple[str, ...]]:
    """The requests of each plan that had several."""
    return [tuple(map(_name, plan.request_ids)) for plan in plans_of(decisions) if len(plan.members) > 1]


def check_shared(decisions: Sequence[LogEntry], names: Sequence[str]) -> None:
    """Each was encoded once; some together, no more than the profile says; each condition went to its own D."""
    plans = [plan for plan in plans_of(decisions) if any(_name(one) in names for one in plan.request_ids)]
    encode = [plan for plan in plans if plan.stages == (Stage.ENCODE,)]
    assert sorted(_name(one) for plan in encode for one in plan.request_ids) == sorted(names)
    assert {plan.leader for plan in encode} == {"w0"}
    assert max(len(plan.members) for plan in encode) == MOST_AT_ONCE
    denoise = {_name(plan.request_ids[0]): plan for plan in plans if Stage.DIFFUSE in plan.stages}
    for plan in encode:
        for member in plan.members:
            its_own = denoise[_name(member.request_id)]
            assert member.push_to == its_own.leader
            assert its_own.members[0].input_id == plan.plan_id
    shared = next(plan for plan in encode if len(plan.members) > 1)
    assert len({member.push_to for member in shared.members}) == len(shared.members)


def check_decoded_by_two(decisions: Sequence[LogEntry], name: str) -> None:
    """D and C were one plan of two workers, which ran both."""
    (plan,) = (one for one in plans_of(decisions) if Stage.DECODE in one.stages and _name(one.request_ids[0]) == name)
    assert plan.stages == (Stage.DIFFUSE, Stage.DECODE)
    assert plan.workers_of(Stage.DECODE) == plan.workers
    assert plan.degree == 2


def check_decoded_by_two_auxiliaries(decisions: Sequence[LogEntry], name: str) -> None:
    """D was a plan of one worker, which pushed the latents to two others."""
    plans = [plan for plan in plans_of(decisions) if _name(plan.request_ids[0]) == name]
    assert [(plan.stages, plan.workers) for plan in plans] == [
        ((Stage.ENCODE,), ("w0",)),
        ((Stage.DIFFUSE,), ("w1",)),
        ((Stage.DECODE,), ("w2", "w3")),
    ]
    assert plans[-1].members[0].input_id == plans[-2].plan_id


def plans_of(decisions: Sequence[LogEntry]) -> list[DispatchPlan]:
    return [effect.plan for one in decisions for effect in one.effects if isinstance(effect, ev.RunPlan)]


def _name(request_id: str) -> str:
    return request_id.partition("~")[0]
