"""The records of requests that users see (state, timeline), derived from events and effects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from tridentserve.plans import DispatchPlan, StageSpan
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.stages import Stage


class RequestState(StrEnum):
    """The progress of a request through the service. The last three values are final."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELLED)


@dataclass(slots=True)
class RequestRecord:
    """The progress and the result of one request."""

    spec: RequestSpec
    arrival_s: float
    state: RequestState = RequestState.QUEUED
    retries: int = 0
    timeline: list[StageSpan] = field(default_factory=list)
    """Its stages as they ran, on the scheduler's clock."""
    saved_timeline: list[StageSpan] = field(default_factory=list)
    """The timeline that it returns to if it resumes from its latest checkpoint."""
    latency_s: float | None = None
    """Seconds from arrival to the result; None without one."""
    slo_s: float | None = None
    """Seconds from arrival to the deadline; None before the end."""
    predicted_s: float | None = None
    """Seconds from arrival to its end that were predicted when it arrived; None where nothing was."""
    error_code: str | None = None
    """Code of a class in `tridentserve.errors` when it ended without a result."""
    error: str | None = None

    @property
    def slo_met(self) -> bool:
        return self.latency_s is not None and self.slo_s is not None and self.latency_s <= self.slo_s

    @property
    def queue_s(self) -> float:
        """Seconds from arrival to the start of the first stage; 0 when none has ended yet."""
        return max(0.0, self.timeline[0].start_s - self.arrival_s) if self.timeline else 0.0

    @property
    def is_denoised(self) -> bool:
        """True where its timeline has all its denoising steps."""
        return sum(span.steps or 0 for span in self.timeline) >= self.spec.num_inference_steps

    def stage_seconds(self) -> dict[str, float]:
        """Seconds per stage, added up over the runs of it."""
        totals: dict[str, float] = {}
        for span in self.timeline:
            totals[span.stage.value] = totals.get(span.stage.value, 0.0) + span.seconds
        return totals


class RequestRecords:
    """The records of all requests that an engine has not dropped yet."""

    def __init__(self) -> None:
        self.records: dict[str, RequestRecord] = {}
        self._plans: dict[int, DispatchPlan] = {}

    def apply(self, event: ev.Event, effects: Iterable[ev.Effect], now_s: float) -> None:
        """Take in an event and what the scheduler made of it."""
        match event:
            case ev.RequestArrived():
                self.records.setdefault(event.spec.request_id, RequestRecord(event.spec, now_s - event.spec.waited_s))
            case ev.StageFinished():
                self._add_spans(event)
            case ev.CheckpointSaved():
                self._save_timeline(event)
            case ev.PlanFailed() | ev.PlanStopped():
                self._plans.pop(event.plan_id, None)
            case _:
                pass
        for effect in effects:
            self._apply_effect(effect)

    def drop(self, request_id: str) -> None:
        """Forget a request, once its result has been handed out for long enough."""
        self.records.pop(request_id, None)

    def _add_spans(self, event: ev.StageFinished) -> None:
        plan = self._plans.pop(event.plan_id, None)
        if plan is None:
            return
        for request_id in plan.request_ids:
            record = self.records.get(request_id)
            # One that had all its steps when the plan began was not part of it.
            if record is not None and not (Stage.DIFFUSE in plan.stages and record.is_denoised):
                record.timeline += event.spans

    def _save_timeline(self, event: ev.CheckpointSaved) -> None:
        plan = self._plans.get(event.plan_id)
        if plan is None:
            return
        for request_id in plan.request_ids:
            if (record := self.records.get(request_id)) is not None:
                record.saved_timeline = [*record.timeline, *event.spans]

    def _apply_effect(self, effect: ev.Effect) -> None:
        match effect:
            case ev.RunPlan():
                self._plans[effect.plan.plan_id] = effect.plan
                for request_id in effect.plan.request_ids:
                    if (record := self.records.get(request_id)) is not None:
                        record.state = RequestState.RUNNING
            case ev.Requeue() | ev.Finish() | ev.Reject():
                if (record := self.records.get(effect.request_id)) is not None:
                    self._apply_end(record, effect)
            case ev.Abort() | ev.Yield() | ev.Place() | ev.SetAside() | ev.Drained() | ev.Unload() | ev.Degrade():
                pass

    @staticmethod
    def _apply_end(record: RequestRecord, effect: ev.Requeue | ev.Finish | ev.Reject) -> None:
        match effect:
            case ev.Requeue():
                record.state = RequestState.QUEUED
                record.timeline = list(record.saved_timeline) if effect.steps_done else []
                record.retries += 1
            case ev.Finish():
                record.state = RequestState.COMPLETED
                record.latency_s, record.slo_s = effect.latency_s, effect.slo_s
                record.predicted_s = effect.predicted_s
            case ev.Reject():
                cancelled = effect.code == "cancelled"
                record.state = RequestState.CANCELLED if cancelled else RequestState.FAILED
                record.error_code, record.error = effect.code, effect.reason
                record.predicted_s = effect.predicted_s
