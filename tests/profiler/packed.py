"""A profile whose steps cost something once, for each request, for each token and for each pair of tokens."""

from __future__ import annotations

from dataclasses import replace

from profiler import CostModel
from tests.profiler.synthetic import table
from tridentserve.requests import Shape
from tridentserve.stages import Stage

BATCHES = (1, 2, 4)
REQUEST_S, TOKEN_S, PAIR_S = 0.001, 1e-5, 5e-9


def compute_step_s(once_s: float, shapes: list[Shape]) -> float:
    lengths = [shape.tokens for shape in shapes]
    each_s = (REQUEST_S + TOKEN_S * length + PAIR_S * length**2 for length in lengths)
    return once_s + sum(each_s)


def make_cost_model(once_s: float, batches: tuple[int, ...] = BATCHES, group_s: float = 0.0) -> CostModel:
    """The times of model `one`; D at degree 1 was profiled with these batches. A group takes `group_s` longer than its
    share of a step."""
    whole = table(("one",))
    rows = []
    for row in whole.rows:
        at_once = batches if (row.stage, row.degree) == (Stage.DIFFUSE, 1) else (1,)
        for batch in at_once:
            seconds = row.seconds if row.stage is not Stage.DIFFUSE else compute_step_s(once_s, [row.shape] * batch)
            seconds = seconds / row.degree + (group_s if row.degree > 1 else 0.0)
            rows.append(replace(row, batch=batch, seconds=seconds, peak_bytes=row.peak_bytes * batch))
    return CostModel([replace(whole, rows=tuple(rows))], "gpu")
