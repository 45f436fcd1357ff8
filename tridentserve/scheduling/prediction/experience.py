"""Experience with predictions: by how much requests took longer or shorter than was estimated, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tridentserve.scheduling.prediction.costs import RequestKind

# The most by which experience corrects an estimate, either way, as a logarithm.
_MOST = math.log(16.0)
# Each request that ended counts for this much of the next one: what was learned in another load fades.
_KEPT = 0.995
# Expected squares of what is left unexplained, and of the constant.
_NOISE, _CONSTANT = 0.02, 1.0
# Those of the weights of other signs. A rehearsal looks at the crowd itself, so that less is to be learned.
_WEIGHT, _WEIGHT_REHEARSED = 0.25, 0.02
# What is further from a fit than so many times the usual distance, and twice what the fit itself is unsure of, counts
# as if it were there: the few requests that were overtaken for long must not spoil the predictions for all others.
_USUAL_ERRORS, _LEAST_USUAL = 2.0, 0.1
# The usual distance follows the latest ones by this share; one counts for at most so many times of it.
_FOLLOWED, _MOST_USUAL = 0.2, 3.0
# The measures of a crowd are not told apart beyond these.
_MOST_BACKLOG, _MOST_DEMAND = 2.0, 4.0

# No estimate is below this, in seconds.
LEAST_ESTIMATE_S = 0.001

Signs = tuple[float, float, float]
"""All that tells by how much an estimate will be wrong; the first is 1."""


class Crowding(NamedTuple):
    """The measure in which workers are crowded when a request comes."""

    backlog: float
    """Seconds of work of each worker, over the seconds that the request takes alone."""
    demand: float
    """Workers that all requests together would use at their optimal degrees, over those that there are."""

    def as_signs(self) -> Signs:
        return 1.0, min(self.backlog, _MOST_BACKLOG), min(self.demand, _MOST_DEMAND)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The time that a request is estimated to take, before experience corrects it."""

    seconds: float
    """Seconds from when the scheduler got it to its end."""
    degree: int | None
    """The degree at which D begins; None where all was rehearsed."""
    signs: Signs

    @staticmethod
    def of_rehearsal(seconds: float, wait_s: float) -> Estimate:
        """That of a rehearsal in which it waits `wait_s` for its first workers: waits are known less well than the
        rest."""
        return Estimate(seconds, None, (1.0, min(1.0, wait_s / seconds), 0.0))

    def scale(self, factor: float) -> Estimate:
        """The estimate where all takes `factor` times as long."""
        return replace(self, seconds=factor * self.seconds)


@dataclass(slots=True)
class _RatioFit:
    """A linear fit of the logarithm of actual over estimated seconds: recursive least squares, with forgetting. Errors
    that are large count less (after P. J. Huber, Robust estimation of a location parameter, 1964)."""

    weights: Signs
    covariance: tuple[Signs, Signs, Signs]
    most_trace: float
    """The sum of the variances at the beginning."""
    usual_error: float = _LEAST_USUAL

    def predict(self, x: Signs) -> float:
        return _dot(self.weights, x)

    def learn(self, x: Signs, y: float) -> None:
        spread = _multiply(self.covariance, x)
        variance = max(0.0, _dot(spread, x))
        gain = [value / (_KEPT + variance) for value in spread]
        error = y - self.predict(x)
        distance = min(abs(error), _MOST_USUAL * self.usual_error)
        self.usual_error = max(_LEAST_USUAL, (1 - _FOLLOWED) * self.usual_error + _FOLLOWED * distance)
        most = _USUAL_ERRORS * self.usual_error + 2 * math.sqrt(_NOISE * variance)
        error = min(max(error, -most), most)
        self.weights = _make_signs([w + k * error for w, k in zip(self.weights, gain, strict=True)])
        left = [[value - gain[i] * spread[j] for j, value in enumerate(row)] for i, row in enumerate(self.covariance)]
        # Forgetting makes the fit unsure of what has not varied lately, but never less sure than it was at first. One
        # factor for all keeps the matrix one of covariances.
        trace = left[0][0] + left[1][1] + left[2][2]
        factor = max(1.0, min(1 / _KEPT, self.most_trace / trace)) if trace > 0 else 1.0
        first, second, third = (_make_signs([factor * value for value in row]) for row in left)
        self.covariance = first, second, third


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2]


def _multiply(matrix: Sequence[Signs], x: Signs) -> Signs:
    return _dot(matrix[0], x), _dot(matrix[1], x), _dot(matrix[2], x)


def _make_signs(values: Sequence[float]) -> Signs:
    return values[0], values[1], values[2]


def _make_fit(weight: float, weights: Signs = (0.0, 0.0, 0.0)) -> _RatioFit:
    constant, other = _CONSTANT / _NOISE, weight / _NOISE
    covariance = (constant, 0.0, 0.0), (0.0, other, 0.0), (0.0, 0.0, other)
    return _RatioFit(weights, covariance, constant + 2 * other)


class Experience:
    """Learns from requests that ended, by their kind and the degree that they were estimated to begin at. What an
    estimate leaves out, such as what comes after the request, the degrees of its later segments, and what stages cost
    beside the profile, is much the same from one of these to the next where its signs are alike. What is new begins
    with what is known of its model."""

    def __init__(self) -> None:
        self._fits: dict[tuple[RequestKind, int | None], _RatioFit] = {}
        # Those of models; rehearsals have their own.
        self._models: dict[tuple[str, bool], _RatioFit] = {}
        self._kinds: set[RequestKind] = set()

    def note(self, kind: RequestKind, estimate: Estimate, actual_s: float) -> None:
        """A request has ended of which this was estimated."""
        if estimate.seconds <= 0 or actual_s <= 0:
            return
        log_ratio = min(max(math.log(actual_s / estimate.seconds), -_MOST), _MOST)
        was_rehearsed = estimate.degree is None
        weight = _WEIGHT_REHEARSED if was_rehearsed else _WEIGHT
        model = self._models.setdefault((kind[0], was_rehearsed), _make_fit(weight))
        key = kind, estimate.degree
        if key not in self._fits:
            self._fits[key] = _make_fit(weight, model.weights)
        self._kinds.add(kind)
        self._fits[key].learn(estimate.signs, log_ratio)
        model.learn(estimate.signs, log_ratio)

    def correct(self, kind: RequestKind, estimate: Estimate) -> float:
        """The seconds to be expected of a request of which this is estimated."""
        fit = self._fits.get((kind, estimate.degree)) or self._models.get((kind[0], estimate.degree is None))
        if fit is None:
            return estimate.seconds
        return estimate.seconds * math.exp(min(max(fit.predict(estimate.signs), -_MOST), _MOST))

    def knows(self, kind: RequestKind) -> bool:
        """True when requests of this kind have ended before."""
        return kind in self._kinds
