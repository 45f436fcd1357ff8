"""The recent past of one cell: stages, placements, requests on time. All of it is bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import takewhile

from tridentserve.plans import DispatchPlan, WorkerId
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.watching.cluster_state import (
    GOOD_PREDICTION,
    Attainment,
    ClusterNotice,
    ClusterState,
    EndedStage,
    HandoffLevel,
)

# Stages of the last minute are told, and of very many the latest.
HISTORY_S = 60.0
MAX_STAGES = 2000
# The share of requests on time is that of the last five minutes.
ATTAINMENT_S = 300.0
_MAX_ENDED = 5000
_MAX_NOTICES = 20


class RecentHistory:
    """Derived from events and effects alone. It costs little for each, so that it is kept whether anybody watches or
    not: who begins to watch sees the last minute at once."""

    def __init__(self) -> None:
        self._plans: dict[int, DispatchPlan] = {}
        self._models: dict[str, str] = {}  # of unfinished requests
        self._stages: deque[EndedStage] = deque(maxlen=MAX_STAGES)
        self._notices: deque[ClusterNotice] = deque(maxlen=_MAX_NOTICES)
        # The times at which requests have ended, with their models and what each counts for.
        self._ended: deque[tuple[float, str, Attainment]] = deque(maxlen=_MAX_ENDED)
        self._number = 0

    def apply(self, event: ev.Event, effects: Iterable[ev.Effect], now_s: float) -> None:
        """Take in an event and what the scheduler made of it."""
        match event:
            case ev.RequestArrived():
                self._models.setdefault(event.spec.request_id, event.spec.model)
            case ev.StageFinished():
                self._add_stages(event)
            case ev.PlanFailed() | ev.PlanStopped():
                self._plans.pop(event.plan_id, None)
            case ev.WorkerJoined():
                self._notices.append(ClusterNotice(now_s, "worker_joined", f"{event.worker.worker_id} is ready"))
            case ev.WorkerLost():
                self._notices.append(ClusterNotice(now_s, "worker_lost", f"{event.worker_id} is lost: {event.error}"))
            case _:
                pass
        for effect in effects:
            self._apply_effect(effect, now_s)

    def complete(self, state: ClusterState, handoff: Mapping[WorkerId, HandoffLevel]) -> ClusterState:
        """The state with what is past. `handoff`: the fill of the buffers of workers that have told it."""
        recent = list(takewhile(lambda stage: stage.end_s > state.now_s - HISTORY_S, reversed(self._stages)))
        workers = tuple(replace(worker, handoff=handoff.get(worker.worker_id)) for worker in state.workers)
        return replace(
            state,
            workers=workers,
            attainment=self._sum_attainment(state),
            notices=tuple(self._notices),
            ended=tuple(reversed(recent)),
            cursor=(self._number,),
        )

    def _add_stages(self, event: ev.StageFinished) -> None:
        plan = self._plans.pop(event.plan_id, None)
        if plan is None:
            return
        for span in event.spans:
            self._number += 1
            self._stages.append(
                EndedStage(
                    number=self._number,
                    plan_id=plan.plan_id,
                    model=plan.model,
                    stage=span.stage.letter,
                    workers=span.workers,
                    request_ids=plan.request_ids,
                    start_s=span.start_s,
                    end_s=span.end_s,
                    steps=span.steps,
                )
            )

    def _apply_effect(self, effect: ev.Effect, now_s: float) -> None:
        match effect:
            case ev.RunPlan():
                self._plans[effect.plan.plan_id] = effect.plan
            case ev.Place():
                self._notices.append(ClusterNotice(now_s, "placement", effect.reason))
            case ev.Requeue():
                model = self._models.get(effect.request_id, "a model")
                text = f"a request of {model} waits again: {effect.reason}"
                self._notices.append(ClusterNotice(now_s, "requeue", text))
            case ev.SetAside():
                is_back = effect.until_s is None
                what = "is given plans again" if is_back else "is set aside"
                text = f"{effect.worker_id} {what}: {effect.reason}"
                self._notices.append(ClusterNotice(now_s, "worker_back" if is_back else "worker_aside", text))
            case ev.Finish():
                self._note_end(effect.request_id, now_s, _judge(effect))
            case ev.Reject():
                is_counted = effect.code not in ("cancelled", "invalid_request")
                self._note_end(effect.request_id, now_s, Attainment(ended=1) if is_counted else None)
            case _:
                pass

    def _note_end(self, request_id: str, now_s: float, counted: Attainment | None) -> None:
        model = self._models.pop(request_id, None)
        if model is not None and counted is not None:
            self._ended.append((now_s, model, counted))

    def _sum_attainment(self, state: ClusterState) -> dict[str, Attainment]:
        """The requests that have ended lately, beside the overdue ones of `state`."""
        while self._ended and self._ended[0][0] < state.now_s - ATTAINMENT_S:
            self._ended.popleft()
        found = dict(state.attainment)
        for _, model, counted in self._ended:
            found[model] = found.get(model, Attainment()).add(counted)
        return found


def _judge(effect: ev.Finish) -> Attainment:
    """One request that has its result."""
    is_good = effect.predicted_s is not None and (
        abs(effect.predicted_s - effect.latency_s) <= GOOD_PREDICTION * effect.latency_s
    )
    return Attainment(
        on_time=int(effect.latency_s <= effect.slo_s),
        ended=1,
        predicted=int(effect.predicted_s is not None),
        predicted_well=int(is_good),
    )
