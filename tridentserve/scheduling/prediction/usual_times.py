"""The usual times of requests of each kind, beside which a prediction that looks at the crowd has to prove itself."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from tridentserve.scheduling.prediction.costs import RequestKind

# The usual time is that of the latest requests; some more of them tell how far it is to be trusted.
_LATEST, _COMPARED = 15, 30
# With fewer requests there is nothing usual yet.
_FEWEST = 4
# Differences, as logarithms, count for no more than this.
_MOST_DIFFERENCE = 0.7
# The sum of squared differences with which the usual time is trusted half as far as it has deserved.
_DOUBT = 0.1
# The usual time is heard up to so many times the difference that it usually had.
_MOST_HEARD = 2.0


class _Comparison(NamedTuple):
    """A request that has ended, in logarithms of seconds."""

    difference: float
    """From the prediction to the usual time."""
    error: float
    """From the prediction to what it took."""


@dataclass(slots=True)
class _KindHistory:
    """The latest requests of one kind."""

    log_ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    """Logarithms of what they took over what they take alone."""
    compared: deque[_Comparison] = field(default_factory=lambda: deque(maxlen=_COMPARED))
    """Those that ended since there is a usual time."""

    def mix(self, difference: float) -> float:
        """The part of a difference between prediction and usual time by which the prediction is to be changed: a
        regression of its errors on such differences."""
        squares = sum(each.difference**2 for each in self.compared)
        if squares <= 0:
            return 0.0
        share = sum(each.difference * each.error for each in self.compared) / (squares + _DOUBT)
        most = _MOST_HEARD * math.sqrt(squares / len(self.compared))
        return min(max(share, 0.0), 1.0) * min(max(difference, -most), most)


class UsualTimes:
    """Mixes a prediction for a request of some kind with the time that requests of the kind usually took of late.

    What hardly ever waits takes much the same each time, whatever is under way; what waits for others does not. The
    usual time counts as far as it was nearer to the truth where both differed.
    """

    def __init__(self) -> None:
        self._kinds: dict[RequestKind, _KindHistory] = {}

    def mix(self, kind: RequestKind, predicted_s: float, alone_s: float) -> float:
        """Seconds to be expected of a request of which these are predicted, and which is to take `alone_s` alone."""
        history = self._kinds.get(kind)
        if history is None or len(history.log_ratios) < _FEWEST or min(predicted_s, alone_s) <= 0:
            return predicted_s
        return predicted_s * math.exp(history.mix(median(history.log_ratios) - math.log(predicted_s / alone_s)))

    def note(self, kind: RequestKind, predicted_s: float, alone_s: float, actual_s: float) -> None:
        """A request has ended of which this would have been predicted."""
        if min(predicted_s, alone_s, actual_s) <= 0:
            return
        history = self._kinds.setdefault(kind, _KindHistory())
        if len(history.log_ratios) >= _FEWEST:
            difference = median(history.log_ratios) - math.log(predicted_s / alone_s)
            history.compared.append(_Comparison(_limit(difference), _limit(math.log(actual_s / predicted_s))))
        history.log_ratios.append(math.log(actual_s / alone_s))


def _limit(difference: float) -> float:
    return min(max(difference, -_MOST_DIFFERENCE), _MOST_DIFFERENCE)
