"""Rows for sizes that nobody has measured, from those that were: a sum of costs that grow with the size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from profiler.tables.rows import ProfileRow, ProfileTable
from tridentserve.requests import Shape
from tridentserve.stages import Stage

# What a stage does once, for each token, and for each pair of tokens (TridentServe, arXiv 2510.02838, section 5.1).
_POWERS = (0, 1, 2)
# A sum of more terms is taken where its relative error is smaller by more than this.
_SAME_ERROR = 1e-9


def add_unmeasured(table: ProfileTable, shapes: Sequence[Shape]) -> ProfileTable:
    """The table of one model with `modelled` rows, at degree 1 and batch 1, for those of `shapes` that a stage was not
    measured at. A stage without any row stays so."""
    rows = [row for stage in Stage for row in _model_stage(_select_rows(table, stage), shapes)]
    return replace(table, rows=(*table.rows, *rows))


def _select_rows(table: ProfileTable, stage: Stage) -> list[ProfileRow]:
    return [row for row in table.rows if (row.stage, row.degree, row.batch) == (stage, 1, 1)]


def _model_stage(measured: Sequence[ProfileRow], shapes: Sequence[Shape]) -> list[ProfileRow]:
    known = {row.shape for row in measured}
    missing = [shape for shape in shapes if shape not in known]
    if not (measured and missing):
        return []
    seconds = fit_growth([(row.shape.tokens, row.seconds) for row in measured])
    peak_bytes = fit_growth([(row.shape.tokens, row.peak_bytes) for row in measured])
    source = f"modelled: fitted to {len(measured)} measured sizes"
    return [
        replace(
            measured[0],
            shape=shape,
            seconds=seconds(shape.tokens),
            peak_bytes=round(peak_bytes(shape.tokens)),
            source=source,
        )
        for shape in missing
    ]


def fit_growth(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """The function of the number of tokens whose relative squared errors at the points (tokens, value) are least, of
    all a + b n + c n^2 without a negative coefficient; the one with the fewest terms where several are as good."""
    terms = [[tokens**power for power in _POWERS] for tokens, _ in points]
    coefficients = fit_sum(terms, [value for _, value in points], most_terms=len({tokens for tokens, _ in points}))
    return lambda n: sum(
        coefficient * n**power for power, coefficient in zip(_POWERS, coefficients, strict=True) if coefficient
    )


def fit_sum(terms: Sequence[Sequence[float]], values: Sequence[float], most_terms: int) -> tuple[float, ...]:
    """The coefficients, none of them negative, with which the terms of each point add up to its value with the least
    relative squared errors, where at most `most_terms` are above 0; those with the fewest such terms where several are
    as good."""
    columns = np.array(terms, dtype=float)
    scaled = columns / np.maximum(np.array(values, dtype=float), np.finfo(float).tiny)[:, None]
    best: tuple[float, tuple[float, ...]] | None = None
    for count in range(1, min(columns.shape[1], most_terms) + 1):
        for chosen in combinations(range(columns.shape[1]), count):
            found = np.linalg.lstsq(scaled[:, chosen], np.ones(len(values)), rcond=None)[0]
            error = float(np.sum((scaled[:, chosen] @ found - 1) ** 2))
            if (found >= 0).all() and (best is None or error < best[0] - _SAME_ERROR):
                coefficients = np.zeros(columns.shape[1])
                coefficients[list(chosen)] = found
                best = error, tuple(coefficients.tolist())
    assert best is not None, "one term alone has a positive coefficient"
    return best[1]
