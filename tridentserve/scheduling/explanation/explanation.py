"""The explanation of one request, as data. All times are in seconds from its arrival."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tridentserve.plans import WorkerId
from tridentserve.scheduling.explanation.chronicle import Life, PlanEnd
from tridentserve.scheduling.explanation.waits import WaitKind, WaitStretch

# A re-run that changes nothing is as good as the log where it ends within this share of the latency, or these seconds.
_CLOSE_SHARE, _CLOSE_S = 0.05, 0.2
# What gains less than this share of the latency is no cause of it.
_LEAST_GAIN = 0.02

CauseKind = Literal[
    "request",  # one other request
    "load",  # all other requests
    "order",  # the policy preferred others, or nobody
    "loading",  # of weights
    "overheads",  # of starting plans and reporting results
    "own time",  # its stages took longer than it had
]


@dataclass(frozen=True, slots=True)
class ExplainedPlan:
    """One plan of the request."""

    stages: str
    """Letters, such as "EDC"."""
    workers: tuple[WorkerId, ...]
    """The number of workers is the degree of D."""
    sent_s: float
    """The time at which the scheduler sent it."""
    start_s: float | None
    """The time at which its first stage began; None where none has ended."""
    end_s: float | None
    """The time at which its end was reported."""
    outcome: PlanEnd
    shared_with: tuple[str, ...]
    """The requests that ran in the same batch."""
    reason: str
    """The scheduler's, in its own words."""


@dataclass(frozen=True, slots=True)
class ExplainedWait:
    """One stretch of waiting for one thing."""

    kind: WaitKind
    start_s: float
    end_s: float
    request_ids: tuple[str, ...]
    """The requests that had the workers that it waited for."""
    workers: tuple[WorkerId, ...]
    """The workers that it waited for; where it was held back, those that were free."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """The end of the request when the log is run again, as it was or with something changed."""

    change: str
    """In words; empty where nothing is changed."""
    latency_s: float | None
    """The latency of the log less the gain; of a re-run that changes nothing its own. None where it did not finish."""
    gain_s: float | None
    """Seconds by which it ends sooner than in the re-run that follows the log as far and changes nothing."""
    on_time: bool | None
    """None where its deadline is not known."""
    is_certain: bool
    """It gains more than twice the seconds that the re-run without a change is off the log."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that made the request take as long as it did."""

    kind: CauseKind
    seconds: float
    """The seconds that it took, by the log."""
    request_id: str | None = None
    """The other request, of the kind "request"."""
    without: Rerun | None = None
    """The re-run without it; None where none was made."""
    verified: bool = False
    """The request ends sooner without it, by more than twice what the re-run is off and by a fiftieth of its latency at
    least. Of its own time: it is late even without any other request."""

    def check(self, without: Rerun | None) -> Cause:
        """The cause with the re-run without it."""
        if without is None:
            return self
        if self.kind == "own time":
            return replace(self, without=without, verified=without.on_time is False)
        gain_s, latency_s = without.gain_s or 0.0, without.latency_s or 0.0
        matters = without.latency_s is not None and gain_s >= _LEAST_GAIN * (latency_s + gain_s)
        return replace(self, without=without, verified=without.is_certain and matters)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Says why a request ended when it did."""

    request_id: str
    model: str
    size: str
    num_inference_steps: int
    outcome: str
    """ "finished", "unfinished", or the code of its error."""
    reason: str
    """The scheduler's, for its end."""
    latency_s: float | None
    slo_s: float | None
    """Seconds from arrival to the deadline; None where it is not known."""
    late_s: float | None
    """Seconds from the deadline to the end; below 0 when it was on time."""
    computing_s: float
    """Seconds of its stages."""
    plans: tuple[ExplainedPlan, ...]
    waits: tuple[ExplainedWait, ...]
    requeues: tuple[tuple[float, str], ...]
    """The times at which it had to wait again after a failure, with the reasons."""
    causes: tuple[Cause, ...] = ()
    """Those that were verified first, and of these the ones without which it ends soonest."""
    what_ifs: tuple[Rerun, ...] = ()
    """Further changes under which the log was run again."""
    baseline: Rerun | None = None
    """The re-run that changes nothing and is furthest off the log; None where it was not run again."""
    deviation_s: float | None = None
    """Seconds by which that one ends the request later than the log (below 0: sooner)."""
    is_close: bool | None = None
    """The deviation is so small that the changes are as good as the log; None where it is not known."""
    not_run: str = ""
    """The reason why the log was not run again, or not with all changes."""
    text: str = ""
    """All of it in plain words."""


def rename_requests(explanation: Explanation, rename: Callable[[str], str]) -> Explanation:
    """The explanation with the ids that clients know of requests; not in words, which are made with them."""
    plans = (replace(each, shared_with=tuple(map(rename, each.shared_with))) for each in explanation.plans)
    waits = (replace(each, request_ids=tuple(map(rename, each.request_ids))) for each in explanation.waits)
    causes = (
        replace(cause, request_id=rename(cause.request_id)) if cause.request_id is not None else cause
        for cause in explanation.causes
    )
    return replace(
        explanation,
        request_id=rename(explanation.request_id),
        plans=tuple(plans),
        waits=tuple(waits),
        causes=tuple(causes),
    )


def is_close(deviation_s: float, latency_s: float) -> bool:
    """True where a re-run without a change is as good as the log."""
    return abs(deviation_s) <= max(_CLOSE_SHARE * latency_s, _CLOSE_S)


def describe_life(life: Life, waits: list[WaitStretch]) -> Explanation:
    """All that the log itself says of a request."""
    since_s, shape = life.arrival_s, life.spec.shape
    return Explanation(
        request_id=life.request_id,
        model=life.spec.model,
        size=str(shape),
        num_inference_steps=life.spec.num_inference_steps,
        outcome=life.outcome,
        reason=life.reason,
        latency_s=life.latency_s,
        slo_s=life.slo_s,
        late_s=life.late_s,
        computing_s=sum(span.seconds for logged in life.plans for span in logged.spans),
        plans=tuple(
            ExplainedPlan(
                stages="".join(stage.letter for stage in logged.plan.stages),
                workers=logged.plan.workers,
                sent_s=logged.sent_s - since_s,
                start_s=logged.spans[0].start_s - since_s if logged.spans else None,
                end_s=None if logged.reported_s is None else logged.reported_s - since_s,
                outcome=logged.outcome,
                shared_with=tuple(name for name in logged.plan.request_ids if name != life.request_id),
                reason=logged.reason,
            )
            for logged in life.plans
        ),
        waits=tuple(
            ExplainedWait(wait.kind, wait.start_s - since_s, wait.end_s - since_s, wait.request_ids, wait.workers)
            for wait in waits
        ),
        requeues=tuple((time_s - since_s, reason) for time_s, reason in life.requeues),
    )


def to_plain(explanation: Explanation) -> dict[str, Any]:
    """The explanation as JSON has it."""
    return {"object": "request.explanation", "id": explanation.request_id, **asdict(explanation)}
