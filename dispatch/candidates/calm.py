"""Tells when no request is being lost, so that the earliest deadline can go first.

Where not all requests can be in time, those that take little must go first, as most are served so. Where all can, that
order is wrong: long requests wait for every short one that comes, until it is too late for them. It shows which of the
two holds: as long as no request that could have been in time has become hopeless, all can be in time.
"""

from __future__ import annotations

import math

from dispatch.candidates.survey import TickView
from dispatch.candidates.work import Waiting


class LossMemory:
    """Remembers when a waiting request was last seen that has become hopeless."""

    def __init__(self, calm_horizons: float | None) -> None:
        """`calm_horizons`: of `ValueOptions.calm`."""
        self._calm_horizons = calm_horizons
        self._lost_s = -math.inf

    def is_calm(self, waiting: Waiting, tick: TickView) -> bool:
        """True when no such request waits, nor has in the latest horizons. To be asked at each tick, when the horizon
        is known."""
        if self._calm_horizons is None:
            return False
        if has_lost(waiting, tick):
            self._lost_s = tick.now_s
        elif tick.now_s >= self._lost_s + self._calm_horizons * tick.pressure.horizon_s:
            return True
        return False


def has_lost(waiting: Waiting, tick: TickView) -> bool:
    """True when a request is hopeless whose deadline would have left time enough for it alone. One whose deadline never
    did says nothing of the others."""
    for work, requests in waiting.items():
        appraisal = tick.appraise(work)
        if requests[0].deadline_s < appraisal.best_finish_s < math.inf:
            for request in requests:
                if request.deadline_s >= appraisal.best_finish_s:
                    break
                if request.deadline_s - request.arrival_s >= appraisal.best_run_s:
                    return True
    return False
