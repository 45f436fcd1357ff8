"""Rows for sizes that nobody has measured, from those that were: a sum of costs that grow with the size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from profiler.fitting import fit_sum
from profiler.tables.lengths import fit_length, fit_peak_length
from profiler.tables.rows import ProfileRow, ProfileTable
from tridentserve.requests import Shape
from tridentserve.stages import Stage

# What a stage does once, for each token, and for each pair of tokens (TridentServe, arXiv 2510.02838, section 5.1);
# E and C for what `StageLength` counts instead of tokens.
_POWERS = (0, 1, 2)


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
    length, peak_length = fit_length(measured), fit_peak_length(measured)
    seconds = fit_growth([(length.measure(row.shape), row.seconds) for row in measured])
    peak_bytes = fit_growth([(peak_length.measure(row.shape), row.peak_bytes) for row in measured])
    source = f"modelled: fitted to {len(measured)} measured sizes"
    return [
        replace(
            measured[0],
            shape=shape,
            seconds=seconds(length.measure(shape)),
            peak_bytes=round(peak_bytes(peak_length.measure(shape))),
            source=source,
        )
        for shape in missing
    ]


def fit_growth(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """The function of a length whose relative squared errors at the points (length, value) are least, of
    all a + b n + c n^2 without a negative coefficient; the one with the fewest terms where several are as good."""
    terms = [[length**power for power in _POWERS] for length, _ in points]
    coefficients = fit_sum(terms, [value for _, value in points], most_terms=len({length for length, _ in points}))
    return lambda n: sum(
        coefficient * n**power for power, coefficient in zip(_POWERS, coefficients, strict=True) if coefficient
    )
