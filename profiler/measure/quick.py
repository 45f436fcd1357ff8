"""A short measurement of a model that nobody has profiled: sizes that span what requests may ask for, as many as a
time budget allows, and a fit for the others."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from profiler.extrapolation import add_unmeasured
from profiler.measure.checks import ProfilePoint, Sweep, find_side_limit
from profiler.measure.processes import OUT_OF_MEMORY
from profiler.measure.run import MeasureOptions, measure
from profiler.measure.sizes import SizeRange
from profiler.measure.stages import WARM_UP, Sample, Source
from profiler.tables.rows import ProfileTable
from tridentserve.errors import ProfileError
from tridentserve.models.model_folder import detect_family
from tridentserve.requests import Shape
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
    after `budget_s` seconds, loads of weights not counted, but for two sizes of each stage and for the usual size,
    which may take as long again; larger sizes get `modelled` rows. `degrees` above 1 are left out where there is no
    time for them, or where they fail. Raises what `measure` raises, and `ProfileError` where the device has no room for
    a stage."""
    family = detect_family(source.folder)
    sizes = sizes.cap_sides(family, find_side_limit(source))
    shapes, vae_shapes = sizes.choose_sizes(family), sizes.choose_vae_sizes(family)
    vae_stages = (Stage.ENCODE, Stage.DECODE) if family.needs_image else (Stage.DECODE,)
    budget, skips = TimeBudget(budget_s, clock, sizes.usual), _Skips(model)
    options = MeasureOptions(_REPEATS, _PASSES, num_threads)

    def run(degrees: tuple[int, ...], known: ProfileTable | None) -> ProfileTable:
        def note(point: ProfilePoint, sample: Sample, table: ProfileTable) -> None:
            budget.note(point, sample)
            on_point(point, sample)

        sweep = Sweep(shapes, degrees, own_shapes=dict.fromkeys(vae_stages, vae_shapes))
        return measure(
            source,
            model,
            sweep,
            options,
            note,
            skips.note,
            known,
            lambda point: skips.refuse(point) or budget.admit(point),
        )

    table = run((1,), None)
    skips.check_stages(table)
    if len(degrees) > 1 and not family.whole and budget.left_s > _WIDE_SHARE * budget_s:
        try:
            table = run(degrees, table)
        except (ProfileError, RuntimeError) as error:
            logger.warning("%s is served at degree 1 only: degree %d failed: %s", model, degrees[-1], error)
    if not family.needs_image:
        table = _level_encode(table)
    return add_unmeasured(table, shapes)


def _level_encode(table: ProfileTable) -> ProfileTable:
    """The table in which ENCODE takes the median time of all sizes at each: a prompt knows of no size."""
    usual_s = statistics.median(row.seconds for row in table.rows if row.stage is Stage.ENCODE)
    rows = (replace(row, seconds=usual_s) if row.stage is Stage.ENCODE else row for row in table.rows)
    return replace(table, rows=tuple(rows))


class _Skips:
    """The points that are not measured, and why."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._no_room: dict[tuple[Stage, int], str] = {}
        """The reason of the first point of a stage and degree for which the device had no room."""

    def note(self, point: ProfilePoint, reason: str) -> None:
        logger.info("%s is not measured: %s", point, reason)
        if reason.startswith(OUT_OF_MEMORY):
            self._no_room.setdefault((point.stage, point.degree), reason)

    def refuse(self, point: ProfilePoint) -> str | None:
        """The reason not to try a point, where a smaller one of its stage had no room: larger sizes come later."""
        return "a smaller size had no room" if (point.stage, point.degree) in self._no_room else None

    def check_stages(self, table: ProfileTable) -> None:
        """Raise `ProfileError` for a stage that was measured at no size."""
        for stage in Stage:
            if not any(row.stage is stage for row in table.rows):
                reason = self._no_room.get((stage, 1), "nothing of it could be measured")
                raise ProfileError(
                    f"stage {stage} of {self._model}: {reason}. A model that is measured has to fit whole: give it a "
                    "smaller number format (models[].dtype), or take the table of another device, with which its "
                    "weights can be streamed or divided (profiles, models[].profile_as, cluster.device_name)"
                )


class TimeBudget:
    """Says before each point whether there is time for it."""

    def __init__(self, budget_s: float, clock: Callable[[], float], usual: Shape | None = None) -> None:
        """`usual`: the size that is measured even where it takes `budget_s` alone."""
        self._usual = usual
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
        if point.shape == self._usual and point not in self._took_s:
            left_s = max(left_s, self._budget_s)
        return None if expected_s <= left_s else f"it would take about {expected_s:.0f} s, and {left_s:.0f} s are left"

    def note(self, point: ProfilePoint, sample: Sample) -> None:
        """A point that was admitted has been measured."""
        is_first = not any((known.stage, known.degree) == (point.stage, point.degree) for known in self._step_s)
        took_s = self._clock() - self._asked_s
        if is_first:  # what it took beside its runs was the load of its weights, and is nothing to save time on
            self._began_s += max(0.0, took_s - _RUNS * sample.seconds)
        self._took_s[point] = took_s
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
