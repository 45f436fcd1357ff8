"""Fits sums of costs to measured values. Pure numbers: nothing here knows of stages or sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

# A sum of more terms is taken where its relative error is smaller by more than this.
_SAME_ERROR = 1e-9


def fit_sum(terms: Sequence[Sequence[float]], values: Sequence[float], most_terms: int) -> tuple[float, ...]:
    """The coefficients, none of them negative, with which the terms of each point add up to its value with the least
    relative squared errors, where at most `most_terms` are above 0; those with the fewest such terms where several are
    as good, and of these the later terms: a cost that grows is not taken for one that is there once, which makes what
    grows faster too large far away from the points. One term alone is the first that is as good."""
    columns = np.array(terms, dtype=float)
    scaled = columns / np.maximum(np.array(values, dtype=float), np.finfo(float).tiny)[:, None]
    best: tuple[float, tuple[float, ...]] | None = None
    for count in range(1, min(columns.shape[1], most_terms) + 1):
        choices = list(combinations(range(columns.shape[1]), count))
        for chosen in choices if count == 1 else reversed(choices):
            found = np.linalg.lstsq(scaled[:, chosen], np.ones(len(values)), rcond=None)[0]
            error = float(np.sum((scaled[:, chosen] @ found - 1) ** 2))
            if (found >= 0).all() and (best is None or error < best[0] - _SAME_ERROR):
                coefficients = np.zeros(columns.shape[1])
                coefficients[list(chosen)] = found
                best = error, tuple(coefficients.tolist())
    assert best is not None, "one term alone has a positive coefficient"
    return best[1]
