"""Models that refuse video jobs at the moment and may return: they are drained, replaced or loaded."""

from __future__ import annotations

from collections.abc import Callable

from tridentserve.errors import ModelUnavailableError, UnknownModelError

REFUSALS = (ModelUnavailableError.code, UnknownModelError.code)
"""Codes with which the scheduler refuses or ends a request whose model is drained or removed."""
AWAY_S, GONE_S = 1800.0, 30.0
"""Seconds that jobs wait for a model that the service still names, and for a model that it does not name. (A model that
replaces another one may be named a moment after the other one has left.)"""
_OPEN = ("serving", "warming")


class ModelAbsences:
    """The times since which models refuse jobs, and since which the service does not even name them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._away_s: dict[str, float] = {}
        self._gone_s: dict[str, float] = {}

    def may_return(self, model: str, state: str | None) -> bool:
        """True if jobs should wait for a model that has just refused one. `state` is the model's state in the service's
        health, None if it has none."""
        now_s = self._clock()
        if state in _OPEN:  # it returned in the meantime
            self.mark_present(model)
            return True
        if state is None:
            gone_s = self._gone_s.setdefault(model, now_s)
        else:
            gone_s = now_s
            self._gone_s.pop(model, None)
        return now_s - self._away_s.setdefault(model, now_s) < AWAY_S and now_s - gone_s < GONE_S

    def mark_present(self, model: str) -> None:
        """The model has accepted a job."""
        self._away_s.pop(model, None)
        self._gone_s.pop(model, None)
