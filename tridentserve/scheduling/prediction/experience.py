"""Experience with predictions: by how much requests took longer or shorter than was estimated, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tridentserve.scheduling.prediction.costs import RequestKind

# The most by which experience corrects an estimate, either way, as a logarithm.
_MOST = math.log(16.0)
# Each request that ended counts for this much of the next one: what was learned in another load fades.
_KEPT = 0.995
# Expected squares of what is left unexplained, of the constant, and of the other weights.
_NOISE, _CONSTANT, _WEIGHT = 0.02, 1.0, 0.25
# The measures of a crowd are not told apart beyond these.
_MOST_BACKLOG, _MOST_DEMAND = 2.0, 4.0

# The degree of estimates that were made by a rehearsal, which decides on degrees itself.
REHEARSED = 0

_Vector = tuple[float, float, float]


class Crowding(NamedTuple):
    """The measure in which workers are crowded when a request comes."""

    backlog: float
    """Seconds of work of each worker, over the seconds that the request takes alone."""
    demand: float
    """Workers that all requests together would use at their optimal degrees, over those that there are."""

    def as_vector(self) -> _Vector:
        return 1.0, min(self.backlog, _MOST_BACKLOG), min(self.demand, _MOST_DEMAND)


@dataclass(slots=True)
class _RatioFit:
    """A linear fit of the logarithm of actual over estimated seconds: recursive least squares, with forgetting."""

    weights: _Vector
    covariance: tuple[_Vector, _Vector, _Vector]

    def predict(self, x: _Vector) -> float:
        return _dot(self.weights, x)

    def learn(self, x: _Vector, y: float) -> None:
        spread = _multiply(self.covariance, x)
        gain = [value / (_KEPT + _dot(spread, x)) for value in spread]
        error = y - self.predict(x)
        self.weights = _make_vector([w + k * error for w, k in zip(self.weights, gain, strict=True)])
        first, second, third = (
            _make_vector(
                [
                    min(value - gain[i] * spread[j], _CONSTANT / _NOISE) / _KEPT
                    for j, value in enumerate(self.covariance[i])
                ]
            )
            for i in range(3)
        )
        self.covariance = first, second, third


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2]


def _multiply(matrix: Sequence[_Vector], x: _Vector) -> _Vector:
    return _dot(matrix[0], x), _dot(matrix[1], x), _dot(matrix[2], x)


def _make_vector(values: Sequence[float]) -> _Vector:
    return values[0], values[1], values[2]


def _make_fit(weights: _Vector = (0.0, 0.0, 0.0)) -> _RatioFit:
    constant, other = _CONSTANT / _NOISE, _WEIGHT / _NOISE
    return _RatioFit(weights, ((constant, 0.0, 0.0), (0.0, other, 0.0), (0.0, 0.0, other)))


class Experience:
    """Learns from requests that ended, by their kind and the degree expected of them. What an estimate leaves out, such as
    what comes after the request, the degrees of its later segments, and what stages cost beside the profile, is
    much the same from one of these to the next in a like crowd. What is new begins with what is known of its model."""

    def __init__(self) -> None:
        # By the kind and the degree at which it was estimated to begin.
        self._fits: dict[tuple[RequestKind, int], _RatioFit] = {}
        self._models: dict[str, _RatioFit] = {}
        self._kinds: set[RequestKind] = set()

    def note(self, kind: RequestKind, degree: int, crowding: Crowding, estimated_s: float, actual_s: float) -> None:
        """A request has ended, which came into this crowd."""
        if estimated_s <= 0 or actual_s <= 0:
            return
        x, log_ratio = crowding.as_vector(), min(max(math.log(actual_s / estimated_s), -_MOST), _MOST)
        model = self._models.setdefault(kind[0], _make_fit())
        key = kind, degree
        if key not in self._fits:
            self._fits[key] = _make_fit(model.weights)
        self._kinds.add(kind)
        self._fits[key].learn(x, log_ratio)
        model.learn(x, log_ratio)

    def correct(self, kind: RequestKind, degree: int, crowding: Crowding, estimated_s: float) -> float:
        """The seconds to be expected of a request that was estimated to take so many."""
        fit = self._fits.get((kind, degree)) or self._models.get(kind[0])
        if fit is None:
            return estimated_s
        return estimated_s * math.exp(min(max(fit.predict(crowding.as_vector()), -_MOST), _MOST))

    def knows(self, kind: RequestKind) -> bool:
        """True when requests of this kind have ended before."""
        return kind in self._kinds
