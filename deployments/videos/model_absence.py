"""Models that refuse video jobs at the moment, and may come back: they are drained, replaced or loaded."""

from __future__ import annotations

from collections.abc import Callable

from tridentserve.errors import ModelUnavailableError, UnknownModelError

# What the scheduler refuses a request with whose model is drained, or removed; or ends it with.
REFUSALS = (ModelUnavailableError.code, UnknownModelError.code)
# How long jobs wait for a model that the service still names; and for one that it does not, as the model that replaces
# it is not always named at once.
AWAY_S, GONE_S = 1800.0, 30.0
_SERVING = "serving"


class AwayModels:
    """Since when models are away, and since when the service does not even name them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._away_s: dict[str, float] = {}
        self._gone_s: dict[str, float] = {}

    def may_come_back(self, model: str, state: str | None) -> bool:
        """Of a model that has refused a job just now. `state`: as the service's health has it; None where it has
        none."""
        now_s = self._clock()
        if state == _SERVING:  # it came back in the meantime
            self.is_back(model)
            return True
        if state is None:
            gone_s = self._gone_s.setdefault(model, now_s)
        else:
            gone_s = now_s
            self._gone_s.pop(model, None)
        return now_s - self._away_s.setdefault(model, now_s) < AWAY_S and now_s - gone_s < GONE_S

    def is_back(self, model: str) -> None:
        """It has taken a job."""
        self._away_s.pop(model, None)
        self._gone_s.pop(model, None)
