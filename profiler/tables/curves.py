"""A monotone curve through profiled points: what a stage costs at sizes between those that were profiled."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate


class TokenCurve:
    """Cost as a function of processing length (`Shape.tokens`), piecewise quadratic, never falling, exact at its knots.

    A transformer's step costs a n + b n^2 (TridentServe, arXiv 2510.02838, section 5.1: time and memory are strongly
    predictable), so each piece is the parabola through its two ends and the next smaller point (the next larger one for
    the first piece), with its slope limited where that parabola would turn. Points of equal length (512x512 and
    256x1024) are averaged; a point below a shorter one, which only noise explains, is lifted to it.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        values: defaultdict[float, list[float]] = defaultdict(list)
        for tokens, value in points:
            values[tokens].append(value)
        self._x = sorted(values)
        self._y = list(accumulate((sum(values[x]) / len(values[x]) for x in self._x), max))

    def covers(self, tokens: float) -> bool:
        """True between the shortest and the longest profiled length."""
        return bool(self._x) and self._x[0] <= tokens <= self._x[-1]

    def interpolate(self, tokens: float) -> float:
        """The value at a length that is covered; outside, a ValueError: nothing is extrapolated."""
        if not self.covers(tokens):
            raise ValueError(f"{tokens} tokens are outside {self._x[:1]} to {self._x[-1:]}")
        left = min(bisect_right(self._x, tokens), len(self._x) - 1) - 1
        if left < 0:
            return self._y[0]
        width, rise = self._x[left + 1] - self._x[left], self._y[left + 1] - self._y[left]
        if rise == 0:
            return self._y[left]
        u = (tokens - self._x[left]) / width
        # y = y0 + rise (s u + (1 - s) u^2) is monotone exactly when s, the scaled slope at the left end, is in [0, 2].
        slope = min(max(self._compute_slope(left) * width / rise, 0.0), 2.0)
        return self._y[left] + rise * (slope * u + (1 - slope) * u * u)

    def read_nearby(self, tokens: float) -> float:
        """The value at any length: before the shortest the value of that, and beyond the longest in proportion. For
        lengths that lie outside because sizes were compared by another measure."""
        nearest = min(max(tokens, self._x[0]), self._x[-1])
        return self.interpolate(nearest) * max(1.0, tokens / self._x[-1])

    def _compute_slope(self, left: int) -> float:
        """Derivative at the left end of a piece, of the parabola through three neighbouring points."""
        if len(self._x) == 2:
            return (self._y[1] - self._y[0]) / (self._x[1] - self._x[0])
        first = max(left - 1, 0)
        (x0, x1, x2), (y0, y1, y2) = self._x[first : first + 3], self._y[first : first + 3]
        secant = (y1 - y0) / (x1 - x0)
        curvature = ((y2 - y1) / (x2 - x1) - secant) / (x2 - x0)
        return secant + curvature * (2 * self._x[left] - x0 - x1)
