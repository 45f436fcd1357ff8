"""A short measurement of a model that nobody has profiled: sizes that span what requests may ask for, as many as a
time budget allows, and a fit for the others."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from profiler.extrapolation import add_unmeasured
from profiler.measure.checks import ProfilePoint, Sweep, find_side_limit
from profiler.measure.run import MeasureOptions, measure
from profiler.measure.sizes import SizeRange
from profiler.measure.stages import WARM_UP, Sample, Source
from profiler.tables.rows import ProfileTable
from tridentserve.errors import ProfileError
from tridentserve.models.model_folder import detect_family
from tridentserve.stages import Stage

logger = logging.getLogger(__name__)

# One timed run of each point in a pass, and as many passes as there is time for, up to this number: other load on a
# machine comes and goes.
_REPEATS, _PASSES = 1, 5
# Runs of a point in one pass: not timed, timed, and to watch the memory and to see the output.
_RUNS = WARM_UP + _REPEATS + 2
# Each stage ends its first pass after this part of the budget.
_STAGE_ENDS = {Stage.ENCODE: 0.2, Stage.DIFFUSE: 0.65, Stage.DECODE: 1.0}
# These many sizes are measured whatever time they take: a fit needs them.
_NEEDED_SIZES = 2
# The cost of the next larger size is expected to grow by a higher power of its work than between the last two, up to
# the square.
_MORE_POWER, _MOST_POWER = 0.5, 2.0
# Degree 2 is measured where this part of the budget is left.
_WIDE_SHARE = 0.5

OnPoint = Callable[[ProfilePoint, Sample], None]


def measure_quickly(
    source: Source,
    model: str,
    sizes: SizeRange,
    degrees: tuple[int, ...],
    num_threads: int,
    budget_s: float,
    on_point: OnPoint = lambda point, sample: None,
    clock: Callable[[], float] = time.monotonic,
) -> ProfileTable:
    """The table of a model on one device, for all sizes of the range. No measurement begins that is expected to end
    after `budget_s` seconds, but for two sizes of each stage; larger sizes get `modelled` rows. `degrees` above 1 are
    left out where there is no time for them, or where they fail. Raises what `measure` raises."""
    family = detect_family(source.folder)
    sizes = sizes.cap_sides(family, find_side_limit(source))
    shapes, vae_shapes = sizes.choose_sizes(family), sizes.choose_vae_sizes(family)
    vae_stages = (Stage.ENCODE, Stage.DECODE) if family.needs_image else (Stage.DECODE,)
    budget = TimeBudget(budget_s, clock)
    options = MeasureOptions(_REPEATS, _PASSES, num_threads)

    def run(degrees: tuple[int, ...], known: ProfileTable | None) -> ProfileTable:
        def note(point: ProfilePoint, sample: Sample, table: ProfileTable) -> None:
            budget.note(point, sample)
            on_point(point, sample)

        sweep = Sweep(shapes, degrees, own_shapes=dict.fromkeys(vae_stages, vae_shapes))
        return measure(source, model, sweep, options, note, _log_skip, known, budget.admit)

    table = run((1,), None)
    if len(degrees) > 1 and not family.whole and budget.left_s > _WIDE_SHARE * budget_s:
        try:
            table = run(degrees, table)
        except (ProfileError, RuntimeError) as error:
            logger.warning("%s is served at degree 1 only: degree %d failed: %s", model, degrees[-1], error)
    if not family.needs_image:
        table = _level_encode(table)
    return add_unmeasured(table, shapes)


def _level_encode(table: ProfileTable) -> ProfileTable:
    """The table in which ENCODE takes the lowest time of all sizes at each: a prompt knows of no size."""
    least_s = min(row.seconds for row in table.rows if row.stage is Stage.ENCODE)
    rows = (replace(row, seconds=least_s) if row.stage is Stage.ENCODE else row for row in table.rows)
    return replace(table, rows=tuple(rows))


def _log_skip(point: ProfilePoint, reason: str) -> None:
    logger.info("%s is not measured: %s", point, reason)


class TimeBudget:
    """Says before each point whether there is time for it."""

    def __init__(self, budget_s: float, clock: Callable[[], float]) -> None:
        self._budget_s = budget_s
        self._clock = clock
        self._began_s = self._asked_s = clock()
        self._took_s: dict[ProfilePoint, float] = {}
        """Seconds from the question for a point to its sample, with a load of weights in it."""
        self._step_s: dict[ProfilePoint, float] = {}
        """Seconds of one run."""

    @property
    def left_s(self) -> float:
        return self._began_s + self._budget_s - self._clock()

    def admit(self, point: ProfilePoint) -> str | None:
        """The reason not to measure a point now; None where there is time for it. Larger sizes come later."""
        self._asked_s = self._clock()
        if point in self._took_s:
            expected_s, part = self._took_s[point], 1.0
        else:
            smaller = [known for known in self._step_s if (known.stage, known.degree) == (point.stage, point.degree)]
            if len(smaller) < _NEEDED_SIZES:
                return None
            expected_s, part = self._expect(point, smaller[-2], smaller[-1]), _STAGE_ENDS[point.stage]
        left_s = self._began_s + part * self._budget_s - self._asked_s
        return None if expected_s <= left_s else f"it would take about {expected_s:.0f} s, and {left_s:.0f} s are left"

    def note(self, point: ProfilePoint, sample: Sample) -> None:
        """A point that was admitted has been measured."""
        self._took_s[point] = self._clock() - self._asked_s
        self._step_s[point] = sample.seconds

    def _expect(self, point: ProfilePoint, before: ProfilePoint, last: ProfilePoint) -> float:
        grown = _count_work(last) / _count_work(before)
        slower = self._step_s[last] / self._step_s[before]
        power = math.log(slower) / math.log(grown) if grown > 1 and slower > 0 else _MOST_POWER
        power = min(max(power + _MORE_POWER, 0.0), _MOST_POWER)
        return float(_RUNS * self._step_s[last] * (_count_work(point) / _count_work(last)) ** power)


def _count_work(point: ProfilePoint) -> float:
    """A measure of the work of a point: tokens for D, and else pixels of all frames."""
    shape = point.shape
    return shape.tokens if point.stage is Stage.DIFFUSE else shape.pixels * shape.num_frames
