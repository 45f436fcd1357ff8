"""The causes of a request's latency, by what it waited for."""

from __future__ import annotations

from collections.abc import Sequence

from tridentserve.scheduling.explanation.chronicle import Chronicle, Life
from tridentserve.scheduling.explanation.explanation import Cause
from tridentserve.scheduling.explanation.waits import BLOCKED, WaitStretch, sum_blockers, sum_kinds

# A cause that took less than this share of the latency is not looked at.
_LEAST_SHARE = 0.05
# Most other requests that are looked at one by one.
_MAX_BLOCKERS = 5


def find_causes(chronicle: Chronicle, life: Life, waits: Sequence[WaitStretch]) -> list[Cause]:
    """The causes that come into question, those that took longest first. Several may have taken the same seconds: two
    requests on two workers, both of which it needed."""
    kinds, blockers = sum_kinds(waits), sum_blockers(waits)
    lives = chronicle.lives
    later = {name for name in blockers if name in lives and lives[name].arrival_s > life.arrival_s}
    busy = [wait for wait in waits if wait.kind in BLOCKED]
    overtaken_s = sum(wait.seconds for wait in busy if later.issuperset(wait.request_ids))
    found = [Cause("request", seconds, name) for name, seconds in list(blockers.items())[:_MAX_BLOCKERS]]
    found.append(Cause("load", sum(wait.seconds for wait in busy)))
    found.append(Cause("order", overtaken_s + kinds.get("held back", 0.0)))
    found.append(Cause("loading", kinds.get("loading", 0.0)))
    found.append(Cause("overheads", kinds.get("starting", 0.0) + kinds.get("reporting", 0.0)))
    own_s = sum(span.seconds for logged in life.plans for span in logged.spans)
    if life.slo_s is not None and own_s > life.slo_s:
        found.append(Cause("own time", own_s))
    least_s = _LEAST_SHARE * (life.latency_s or 0.0)
    return sorted((cause for cause in found if cause.seconds > least_s), key=lambda cause: -cause.seconds)
