"""One scene for both engines: a policy that fails at first, and a placement that a failing tick had decided before."""

from __future__ import annotations

from collections.abc import Sequence

from tests.engine.simulated.greedy import Greedy
from tests.scheduling.fakes import FakeTimes, workers_of
from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import ClusterView, Decisions, StageReport, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry, replay
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.stages import PlacementType

TYPES = {"w0": PlacementType.EDC, "w1": PlacementType.EDC}
REQUESTS = ("r0", "r1", "r2", "r3", "r4")
FAILURE = "the dispatcher failed: ZeroDivisionError('no efficiency')"


class FailsAtFirst:
    """Fails the first three times that it is asked, then decides."""

    def __init__(self) -> None:
        self._greedy = Greedy(degree=1)
        self.failures_left = 3

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return self._greedy.can_ever_run(spec, workers)

    def decide(self, view: ClusterView) -> Decisions:
        if self.failures_left:
            self.failures_left -= 1
            raise ZeroDivisionError("no efficiency")
        return self._greedy.decide(view)


class ProposesOnce:
    """A `Replanner`: the same placement again, once a request has come."""

    def __init__(self, placement: PlacementPlan) -> None:
        self._placement = placement
        self._is_due = False

    def arrived(self, spec: RequestSpec, now_s: float) -> None:
        self._is_due = True

    def stage_finished(self, report: StageReport) -> None:
        """Is not looked at."""

    def expect(self, model: str, load: Sequence[LoadShare], window_s: float | None) -> None:
        """Is not looked at."""

    def forget(self, model: str) -> None:
        """Is not looked at."""

    def propose(self, workers: Sequence[WorkerSpec], placement: PlacementPlan, now_s: float) -> PlacementPlan | None:
        if not self._is_due or placement.epoch:
            return None
        return PlacementPlan(self._placement.replicas, "proposed before the failure", epoch=1)


def failing_scheduler() -> tuple[Scheduler, FailsAtFirst, list[WorkerSpec], PlacementPlan]:
    specs, placement = workers_of(TYPES)
    dispatcher = FailsAtFirst()
    return (
        Scheduler(specs, placement, FakeTimes(), dispatcher, None, ProposesOnce(placement)),
        dispatcher,
        specs,
        placement,
    )


def check_failed_and_served(decisions: Sequence[LogEntry], dispatcher: FailsAtFirst) -> None:
    """The decisions that a failing tick had made before were carried out; then every request was served. The log has
    all ticks, so that a policy that counts them, as this one does, decides the same again."""
    assert dispatcher.failures_left == 0
    effects = [effect for decision in decisions for effect in decision.effects]
    (place,) = (effect for effect in effects if isinstance(effect, ev.Place))
    assert place.reason == "proposed before the failure"
    first_run = next(index for index, effect in enumerate(effects) if isinstance(effect, ev.RunPlan))
    assert effects.index(place) < first_run
    assert sorted(effect.request_id for effect in effects if isinstance(effect, ev.Finish)) == list(REQUESTS)
    assert all(decision.effects == again for decision, again in replay(decisions, failing_scheduler()[0]))
