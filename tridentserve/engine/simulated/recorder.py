"""Records the events of a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tridentserve.engine.simulated.result import (
    FINISHED,
    UNFINISHED,
    Counts,
    PlanOutcome,
    PlanRecord,
    RequestResult,
    SimulationResult,
)
from tridentserve.engine.simulated.workers.devices import PlanRun
from tridentserve.errors import TridentServeError
from tridentserve.plans import PlacementPlan, StageSpan, WorkerId
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.stages import PlacementType, Stage, VirtualReplica

_VIRTUAL_OF = {virtual.primary: virtual for virtual in VirtualReplica}


@dataclass(slots=True)
class _Entry:
    """One request so far, with the workers of its stages; D has those of its first and its last segment."""

    spec: RequestSpec
    arrival_s: float
    end_s: float | None = None
    slo_s: float | None = None
    outcome: str = UNFINISHED
    retries: int = 0
    encode: WorkerId | None = None
    first_diffuse: tuple[WorkerId, ...] = ()
    last_diffuse: tuple[WorkerId, ...] = ()
    decode: WorkerId | None = None
    error: str | None = None
    degraded: ev.Degrade | None = None
    start_s: float | None = None
    predicted_s: float | None = None
    timeline: list[StageSpan] = field(default_factory=list)
    saved_timeline: list[StageSpan] = field(default_factory=list)

    @property
    def made_spec(self) -> RequestSpec:
        """The request as it is made, with less work where it was degraded."""
        return self.spec if self.degraded is None else self.degraded.apply(self.spec)

    def find_reduced_steps(self) -> int | None:
        """The denoising steps where they are fewer than asked for."""
        steps = self.made_spec.num_inference_steps
        return steps if steps != self.spec.num_inference_steps else None

    def find_virtual_replica(self) -> VirtualReplica | None:
        """E counts as held by the primary when it ran on a worker of the first segment of D, C by the last one's."""
        if self.outcome != FINISHED:
            return None
        held = {Stage.DIFFUSE}
        if self.encode in self.first_diffuse:
            held.add(Stage.ENCODE)
        if self.decode in self.last_diffuse:
            held.add(Stage.DECODE)
        primary = PlacementType.of(held)
        return _VIRTUAL_OF[primary] if primary is not None else None


class Recorder:
    """Takes in plans and effects as they come; `result` puts them together."""

    def __init__(self, keep_plans: bool, on_progress: Callable[[float, int], None] | None) -> None:
        self.counts = Counts()
        self._keep_plans = keep_plans
        self._on_progress = on_progress
        self._entries: dict[str, _Entry] = {}
        self._ended = 0
        self._last_s = 0.0
        self._busy_s = dict.fromkeys(Stage, 0.0)
        self._plans: list[PlanRecord] = []
        self._placements: list[tuple[float, PlacementPlan]] = []

    def record_arrival(self, spec: RequestSpec, now_s: float) -> None:
        self._entries[spec.request_id] = _Entry(spec, now_s)

    def get_spec(self, request_id: str) -> RequestSpec:
        """The request as it arrived."""
        return self._entries[request_id].spec

    def get_made_spec(self, request_id: str) -> RequestSpec:
        """The request as it is made, with less work where it was degraded."""
        return self._entries[request_id].made_spec

    def record_degrading(self, effect: ev.Degrade) -> None:
        self._entries[effect.request_id].degraded = effect

    def forget_degrading(self, request_id: str) -> None:
        """The request arrives anew, as it was."""
        self._entries[request_id].degraded = None

    def record_placement(self, plan: PlacementPlan, now_s: float) -> None:
        self._placements.append((now_s, plan))

    def record_assignment(self, effect: ev.RunPlan) -> None:
        """A tick led to this plan."""
        if all(member.inherited for member in effect.plan.members):
            return  # it has been sent ahead of what the policy decided
        self.counts.methods[effect.reason.rsplit(", ", 1)[-1]] += 1

    def knows(self, request_id: str) -> bool:
        """True of a request that has arrived."""
        return request_id in self._entries

    def has_ended(self, request_id: str) -> bool:
        return self._entries[request_id].end_s is not None

    def record_checkpoint(self, run: PlanRun, spans: tuple[StageSpan, ...]) -> None:
        """The states of a running plan were copied, after these stages and denoising steps."""
        self.counts.checkpoints += 1
        if not self._keep_plans:
            return
        for spec in run.specs:
            entry = self._entries[spec.request_id]
            entry.saved_timeline = [*entry.timeline, *spans]

    def record_requeue(self, effect: ev.Requeue) -> None:
        self.counts.retries += 1
        entry = self._entries[effect.request_id]
        entry.retries += 1
        if effect.steps_done:
            self.counts.resumed_steps += effect.steps_done
            entry.timeline = list(entry.saved_timeline)
        else:
            entry.start_s = None
            entry.timeline.clear()

    def record_end(self, effect: ev.Finish | ev.Reject, now_s: float) -> None:
        entry = self._entries[effect.request_id]
        if entry.end_s is not None:
            raise TridentServeError(f"request {effect.request_id} has ended twice: {effect.reason}")
        self._ended += 1
        entry.end_s = self._last_s = now_s
        entry.predicted_s = effect.predicted_s
        if isinstance(effect, ev.Finish):
            entry.outcome, entry.slo_s = FINISHED, effect.slo_s
        else:
            entry.outcome, entry.slo_s, entry.error = effect.code, entry.spec.slo_s, effect.reason
        if self._on_progress is not None:
            self._on_progress(now_s, self._ended)

    def record_run(self, run: PlanRun, now_s: float, outcome: PlanOutcome) -> None:
        """A plan that had started has ended, in one way or another; its spans are those that ran, up to now."""
        plan = run.plan
        self._last_s = max(self._last_s, now_s)
        for span in run.spans:
            self._busy_s[span.stage] += span.gpu_seconds
            for spec in run.specs:
                self._record_stage(self._entries[spec.request_id], span)
                if self._keep_plans and outcome != "failed":  # whose results are lost
                    self._entries[spec.request_id].timeline.append(span)
        if self._keep_plans and run.started_s is not None:
            self._plans.append(
                PlanRecord(
                    plan.plan_id,
                    plan.model,
                    plan.workers,
                    plan.request_ids,
                    run.started_s,
                    now_s,
                    run.spans,
                    outcome,
                    run.used_bytes,
                )
            )

    def _record_stage(self, entry: _Entry, span: StageSpan) -> None:
        if entry.start_s is None:
            entry.start_s = span.start_s
        match span.stage:
            case Stage.ENCODE:
                entry.encode, entry.first_diffuse = span.workers[0], ()
            case Stage.DIFFUSE:
                entry.first_diffuse = entry.first_diffuse or span.workers
                entry.last_diffuse = span.workers
            case Stage.DECODE:
                entry.decode = span.workers[0]

    def make_result(self, num_workers: int) -> SimulationResult:
        requests = [
            RequestResult(
                entry.spec,
                entry.arrival_s,
                entry.end_s,
                entry.slo_s if entry.end_s is not None else entry.spec.slo_s,
                entry.outcome,
                entry.retries,
                entry.find_virtual_replica(),
                entry.error,
                entry.start_s,
                tuple(entry.timeline),
                entry.predicted_s,
                entry.find_reduced_steps(),
                entry.made_spec.quality,
            )
            for entry in self._entries.values()
        ]
        return SimulationResult(
            requests, self.counts, self._last_s, num_workers, self._busy_s, self._placements, self._plans
        )
