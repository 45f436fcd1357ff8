"""The result of one request of a replay, from a live service over HTTP or from the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from pydantic import BaseModel, ConfigDict, Field

from traces.requests import TraceRequest
from tridentserve.errors import DeadlineMissedError
from tridentserve.requests import Quality

# From the one without less work on.
_QUALITY_RANKS: dict[str | None, int] = {quality: rank for rank, quality in enumerate(get_args(Quality))}


class TimelineEntry(BaseModel):
    """One entry of the `timeline` of an answer: a stage as it ran, in the JSON form that clients see.

    It is not `tridentserve.plans.StageSpan`, because the answers of other services are read too, and are checked."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    stage: str
    workers: tuple[str, ...] = Field(min_length=1)
    """The workers in rank order."""
    degree: int = Field(ge=1)
    start_s: float
    """Seconds of the Unix clock; seconds of the simulation in a simulated answer."""
    end_s: float
    steps: int | None = None
    """Denoising steps; None outside DIFFUSE."""


class AnswerFacts(BaseModel):
    """The fields of an answer in addition to the image; a service that is not ours may send none of them."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    stage_durations: dict[str, float] = {}
    timeline: tuple[TimelineEntry, ...] = ()
    slo_s: float | None = None
    slo_met: bool | None = None
    queue_s: float | None = None
    latency_s: float | None = None
    """The service's own figure: seconds from when its scheduler got the request until it had the last report."""
    predicted_s: float | None = None
    """The latency that the service predicted when the request came."""
    reduced_steps: int | None = None
    """The denoising steps where the service made fewer than it was asked for."""
    quality: str | None = None
    """The quality in which the service made it; another service's may be none of ours."""
    peak_memory_mb: float | None = None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of one request of a replay."""

    request: TraceRequest
    model: str
    service_request_id: str
    """The id that the service knows the request by."""
    sent_s: float
    """Seconds from the start of the replay until the request was sent."""
    send_lateness_s: float
    """Seconds from when the request was due until it was sent."""
    latency_s: float
    """Seconds from sending to the last byte of the answer, or to the failure."""
    status: int | None
    """The HTTP status; None without an answer and in a simulation."""
    error: str | None
    """The message of the failure; None exactly when the request was completed."""
    facts: AnswerFacts = field(default_factory=AnswerFacts)
    error_code: str | None = None
    """The code of the service's error (docs/api.md); None where there is none."""

    @property
    def slo_s(self) -> float | None:
        """The deadline, counted from sending: the trace's, else the one that the service says it worked to."""
        return self.facts.slo_s if self.request.slo_ms is None else self.request.slo_ms / 1000

    @property
    def slo_met(self) -> bool | None:
        """Held against the latency that the client saw; the service's own word only where no deadline is known.
        None when the request has no deadline, or failed without one."""
        if self.slo_s is not None:
            return self.error is None and self.latency_s <= self.slo_s
        return self.facts.slo_met

    @property
    def refused(self) -> bool:
        """True when it was refused because it would have been late."""
        return self.error_code == DeadlineMissedError.code

    @property
    def degraded(self) -> bool:
        """True when it was made with less work than it asked for, which it may be with `on_late: degrade` only. A row
        that names no quality counts as one that asks for `exact`."""
        if self.error is not None or self.request.on_late != "degrade":
            return False
        asked = _QUALITY_RANKS[self.request.quality or "exact"]
        return self.facts.reduced_steps is not None or _QUALITY_RANKS.get(self.facts.quality, asked) > asked

    @property
    def out_of_memory(self) -> bool:
        """True when it failed for want of device memory. The message shows it: frameworks and the simulator use these
        words, and an HTTP answer has no field for it."""
        return self.error is not None and "out of memory" in self.error.lower()


def simulated_result(
    request: TraceRequest,
    model: str,
    latency_s: float,
    *,
    error: str | None = None,
    error_code: str | None = None,
    slo_s: float | None = None,
    queue_s: float | None = None,
    peak_memory_mb: float | None = None,
    predicted_s: float | None = None,
    reduced_steps: int | None = None,
    quality: Quality | None = None,
    timeline: Sequence[TimelineEntry] = (),
) -> ReplayResult:
    """The result of a request that was simulated: sent exactly when it was due, answered (or failed) after `latency_s`.

    `slo_s` is the deadline that the policy worked to; the trace's own wins where it has one. `timeline` is in seconds
    of the simulation; the seconds of each stage are its sums. An `error` for want of device memory must hold the words
    "out of memory", to be counted as that.
    """
    durations: dict[str, float] = {}
    for span in timeline:
        durations[span.stage] = durations.get(span.stage, 0.0) + span.end_s - span.start_s
    facts = AnswerFacts(
        stage_durations=durations,
        timeline=tuple(timeline),
        slo_s=slo_s,
        queue_s=queue_s,
        peak_memory_mb=peak_memory_mb,
        predicted_s=predicted_s,
        reduced_steps=reduced_steps,
        quality=quality,
    )
    return ReplayResult(
        request, model, request.request_id, request.timestamp_s, 0.0, latency_s, None, error, facts, error_code
    )
