"""Predictions of the time of packed steps, for mixes of sizes that were never measured, from batches of one size."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from lib.steps.packed_mixes import prepare_state
from profiler.packed_cost import fit_packed_cost
from profiler.tables.rows import ProfileRow
from tridentserve.device import find_device
from tridentserve.pipelines import DenoisingState
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.requests import Shape
from tridentserve.stages import Stage

_BATCHES = (1, 2, 4)
_LARGEST_MIX = 6


def measure_predictions(
    adapter: DiffusersAdapter, sides: Sequence[int], mixes: int, guidance_scale: float, rounds: int, seed: int
) -> dict[str, Any]:
    """Measure a step of batches of each side, and of so many random mixes of sides, by turns, and compare the mixes
    with what the batches let expect. The least time of all rounds counts, as other work only ever adds to it."""
    draw = random.Random(seed)
    batches = [[side] * batch for side in sides for batch in _BATCHES]
    drawn = [draw.choices(sides, k=draw.randint(2, _LARGEST_MIX)) for _ in range(mixes)]
    mixed = [mix for mix in drawn if len(set(mix)) > 1]
    ready = {side: prepare_state(adapter, side, 0, 1, guidance_scale) for side in sides}
    measured: dict[int, list[float]] = {}
    for _ in range(rounds + 1):
        for index, combination in enumerate([*batches, *mixed]):
            measured.setdefault(index, []).append(_time_step(adapter, [ready[side] for side in combination]))
    least_s = [min(times[1:]) for times in measured.values()]  # the first round warms up
    rows = [_make_row(batch, seconds) for batch, seconds in zip(batches, least_s, strict=False)]
    cost = fit_packed_cost(rows)
    alone_s = {row.shape.height: row.seconds for row in rows if row.batch == 1}
    errors = []
    for mix, seconds in zip(mixed, least_s[len(batches) :], strict=True):
        share = cost.compute_share([Shape(side, side).tokens for side in mix])
        errors.append(abs(share * sum(alone_s[side] for side in mix) / seconds - 1))
    return {
        "family": adapter.family,
        "sides": list(sides),
        "measured": len(batches),
        "predicted": len(mixed),
        "mean_error": statistics.mean(errors),
        "worst_error": max(errors),
    }


def _time_step(adapter: DiffusersAdapter, states: Sequence[DenoisingState]) -> float:
    began_s = time.perf_counter()
    adapter.advance(states)
    find_device(adapter.device).wait_for_all_work()
    return time.perf_counter() - began_s


def _make_row(batch: Sequence[int], seconds: float) -> ProfileRow:
    shape = Shape(batch[0], batch[0])
    return ProfileRow("measured", "here", Stage.DIFFUSE, shape, 1, len(batch), seconds, 0, "measured")
