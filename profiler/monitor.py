"""The Monitor: what arrived and what was done, over a window that adapts, and how well the placement still fits that.

TridentServe, arXiv 2510.02838, sections 5.1 ("Monitor") and 5.3 ("Adjust-on-Dispatch"). Pure: time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from profiler.slots import SlotCounter, compute_difference_error
from tridentserve.errors import ConfigError
from tridentserve.protocols import StageReport
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import PlacementType, Stage

# The paper sets the window per model, as models differ in speed. Here this is the longest one.
DEFAULT_WINDOW_S = 300.0
# The shortest: a handful of requests, and still longer than it takes to load weights.
DEFAULT_SHORTEST_WINDOW_S = 15.0
# A rate counts as measured from this many requests in the window.
DEFAULT_MIN_REQUESTS = 8
# Halves of a window differ when their work does by more standard errors than this. They are compared at every look, and
# a window that is too short costs little: the gain of a switch is then looked at over that short time.
_DIFFERENT = 3.0
# Standard errors that are taken off a measured slope: chance alone makes no trend.
_SLOPE_ERRORS = 2.0
# Slots in which arrivals are counted, in the shortest window: its ends are known to an eighth.
_SLOTS_IN_SHORTEST = 8
# Windows are the longest one halved: sums of slots are as long as it up to rounding.
_TOLERANCE = 1e-9

_ServedKind = tuple[str, PlacementType]


@dataclass(frozen=True, slots=True, order=True)
class WorkKind:
    """Requests that cost the same."""

    model: str
    shape: Shape
    num_inference_steps: int


# GPU-seconds of one output of a kind, in each stage.
Weigh = Callable[[WorkKind], Mapping[Stage, float]]


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """The load of one model: outputs per second, over the longest time in which that did not change."""

    window_s: float
    per_s: Mapping[WorkKind, float]
    growth: Mapping[WorkKind, float]
    """By how much outputs per second grow (or fall, below 0) in a second, as far as chance does not explain it."""
    is_steady: bool
    """True when it has not changed in all the time that is kept in mind."""

    def expect(self, ahead_s: float) -> dict[WorkKind, float]:
        """Outputs per second `ahead_s` from now, if what grows continues to grow. The window says how many there were
        in its middle."""
        later_s = self.window_s / 2 + ahead_s
        return {kind: max(0.0, rate + self.growth.get(kind, 0.0) * later_s) for kind, rate in self.per_s.items()}


class Monitor:
    """Counts arrivals and finished stages per model, for as long as the longest window. To count costs O(1)."""

    def __init__(
        self,
        window_s: Mapping[str, float] | None = None,
        default_window_s: float = DEFAULT_WINDOW_S,
        shortest_window_s: float = DEFAULT_SHORTEST_WINDOW_S,
        min_requests: int = DEFAULT_MIN_REQUESTS,
    ) -> None:
        """`window_s`: the longest window per model, `default_window_s` for others. The shortest is that halved, down to
        no less than `shortest_window_s`. Raises `ConfigError` for windows not above 0."""
        self._window_s = dict(window_s or {})
        self._default_window_s = default_window_s
        self._shortest_window_s = shortest_window_s
        self._min_requests = min_requests
        for name, seconds in [*self._window_s.items(), ("default", default_window_s)]:
            _check_window(name, seconds)
        self._arrivals: dict[str, SlotCounter[WorkKind]] = {}
        self._reports: dict[str, SlotCounter[tuple[PlacementType, Stage]]] = {}
        self._since_s: float | None = None

    def arrived(self, spec: RequestSpec, now_s: float) -> None:
        """A request has come in. Each of its outputs counts."""
        if self._since_s is None:
            self._since_s = now_s
        kind = WorkKind(spec.model, spec.shape, spec.num_inference_steps)
        if spec.model not in self._arrivals:
            self._arrivals[spec.model] = self._make_counter(spec.model)
        self._arrivals[spec.model].add(kind, spec.num_outputs, spec.num_outputs**2, now_s)

    def stage_finished(self, report: StageReport) -> None:
        """A stage has run, at `report.span.end_s`."""
        gpu_ns = max(0, round(report.span.gpu_seconds * 1e9))
        if report.model not in self._reports:
            self._reports[report.model] = self._make_counter(report.model)
        self._reports[report.model].add((report.kind, report.span.stage), report.requests, gpu_ns, report.span.end_s)

    def set_window(self, model: str, window_s: float | None) -> None:
        """Set a model's longest window from now on; None: the common one. What was counted of it is forgotten when that
        changes it. Raises `ConfigError` as the constructor does."""
        before_s = self._find_window_s(model)
        self._window_s.pop(model, None)
        if window_s is not None:
            self._window_s[model] = _check_window(model, window_s)
        if self._find_window_s(model) != before_s:
            self.drop(model)

    def drop(self, model: str) -> None:
        """Forget all that was counted of a model."""
        self._arrivals.pop(model, None)
        self._reports.pop(model, None)

    def measure_load(self, now_s: float, weigh: Weigh) -> dict[str, MeasuredLoad]:
        """The load of each model that was asked for, in a fixed order.

        The window begins as the shortest one and is doubled, up to the longest, while what came just before it is as
        much work: in each stage the difference is within what chance explains. So it is long while nothing changes, and
        some seconds after a shift it ends where that was. A young service's window is at least the shortest one.
        """
        loads = {}
        for model, arrivals in sorted(self._arrivals.items()):
            start_slot, is_steady = self._choose_start(model, arrivals, now_s, weigh)
            counts = arrivals.sum_since(start_slot)
            if counts:
                window_s = self._measure_span_s(arrivals, start_slot, now_s)
                per_s = {kind: counts[kind][0] / window_s for kind in sorted(counts)}
                growth = self._measure_growth(arrivals, start_slot, now_s)
                loads[model] = MeasuredLoad(window_s, per_s, growth, is_steady)
        return loads

    def measure_rates(self, now_s: float) -> dict[_ServedKind, float]:
        """The measured v of section 5.1: requests per second of work and worker, per model and placement type, over the
        longest window.

        One over the GPU-seconds that a request takes there, over all stages of the type. Types that have done fewer
        than `min_requests` of one of their stages are left out. A D that was stopped and resumed counts each time;
        where the type has another stage, that one counts the requests.
        """
        rates: dict[_ServedKind, float] = {}
        for model, reports in sorted(self._reports.items()):
            done = reports.sum_since(math.floor((now_s - self._find_window_s(model)) / reports.slot_s) + 1)
            for kind in sorted({kind for kind, _ in done}):
                totals = [done.get((kind, stage), (0, 0)) for stage in sorted(kind.stages)]
                requests, gpu_ns = min(total[0] for total in totals), sum(total[1] for total in totals)
                if requests >= self._min_requests and gpu_ns > 0:
                    rates[model, kind] = requests / (gpu_ns / 1e9)
        return rates

    def _find_window_s(self, model: str) -> float:
        return self._window_s.get(model, self._default_window_s)

    def _make_counter(self, model: str) -> SlotCounter[Any]:
        shortest_s = longest_s = self._find_window_s(model)
        while shortest_s / 2 >= self._shortest_window_s:
            shortest_s /= 2
        return SlotCounter(longest_s, shortest_s / _SLOTS_IN_SHORTEST)

    def _choose_start(
        self, model: str, arrivals: SlotCounter[WorkKind], now_s: float, weigh: Weigh
    ) -> tuple[int, bool]:
        """The slot with which the window begins, and whether nothing older is kept."""
        this_slot, longest_s = math.floor(now_s / arrivals.slot_s), self._find_window_s(model)
        first_slot = math.floor((now_s if self._since_s is None else self._since_s) / arrivals.slot_s)
        slots, start = _SLOTS_IN_SHORTEST, this_slot - _SLOTS_IN_SHORTEST
        while 2 * slots * arrivals.slot_s <= longest_s * (1 + _TOLERANCE) and start > first_slot:
            earlier = max(first_slot, this_slot - 2 * slots)
            newer, older = arrivals.sum_since(start), arrivals.sum_since(earlier, start)
            spans_s = (now_s - start * arrivals.slot_s, (start - earlier) * arrivals.slot_s)
            if _is_different(newer, older, spans_s, weigh):
                return start, False
            slots, start = 2 * slots, earlier
        return start, True

    def _measure_span_s(self, arrivals: SlotCounter[WorkKind], start_slot: int, now_s: float) -> float:
        """The length of a window. What was before the first arrival was not seen, but a young service's window counts
        as a quiet one."""
        since_s = now_s if self._since_s is None else self._since_s
        shortest_s = _SLOTS_IN_SHORTEST * arrivals.slot_s
        return max(now_s - max(start_slot * arrivals.slot_s, since_s), shortest_s)

    def _measure_growth(self, arrivals: SlotCounter[WorkKind], start_slot: int, now_s: float) -> dict[WorkKind, float]:
        middle = (start_slot + math.floor(now_s / arrivals.slot_s)) // 2
        newer, older = arrivals.sum_since(middle), arrivals.sum_since(start_slot, middle)
        newer_s, older_s = now_s - middle * arrivals.slot_s, (middle - start_slot) * arrivals.slot_s
        if self._since_s is None or start_slot * arrivals.slot_s < self._since_s - arrivals.slot_s:
            return {}  # not all of it was seen
        growth = {}
        for kind in sorted({*newer, *older}):
            (new, new_squared), (old, old_squared) = newer.get(kind, (0, 0)), older.get(kind, (0, 0))
            difference = new / newer_s - old / older_s
            error = compute_difference_error(new_squared + old_squared, newer_s, older_s)
            beyond_chance = max(0.0, abs(difference) - _SLOPE_ERRORS * error)
            if beyond_chance:
                growth[kind] = math.copysign(beyond_chance, difference) / ((newer_s + older_s) / 2)
        return growth


def _is_different(
    newer: Mapping[WorkKind, tuple[int, int]],
    older: Mapping[WorkKind, tuple[int, int]],
    spans_s: tuple[float, float],
    weigh: Weigh,
) -> bool:
    """True when two neighbouring times differ in the work per second of some stage by more than chance explains."""
    weights = {kind: weigh(kind) for kind in {*newer, *older}}
    for stage in Stage:
        work, squares = [0.0, 0.0], 0.0
        for half, counts in enumerate((newer, older)):
            for kind, (outputs, squared) in counts.items():
                work[half] += outputs * weights[kind][stage]
                squares += squared * weights[kind][stage] ** 2
        difference = abs(work[0] / spans_s[0] - work[1] / spans_s[1])
        if difference > _DIFFERENT * compute_difference_error(squares, *spans_s):
            return True
    return False


def _check_window(name: str, seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"the Monitor's window for {name} is {seconds} s; give a time above 0")
    return seconds


@dataclass(frozen=True, slots=True)
class StageSpeed:
    """Workers that hold the same stages, and the GPU-seconds of work that arrive for them per second.

    `speed` is what they can do over what arrives: 2 is twice fast enough, below 1 a queue grows. `squared_work`: the
    squares of the GPU-seconds of each request that arrives, per second; 0 where work comes evenly.
    """

    workers: int
    work: float
    squared_work: float = 0.0

    @property
    def speed(self) -> float:
        return self.workers / self.work if self.work > 0 else math.inf

    def shift(self, window_s: float, errors: float) -> StageSpeed:
        """The same workers with `errors` standard errors more work (negative: less), when it was seen for `window_s`
        and requests come independently: few heavy requests say less than many light ones."""
        return replace(self, work=max(0.0, self.work + errors * math.sqrt(self.squared_work / window_s)))

    @property
    def spare_speed(self) -> float:
        """The speed with one worker fewer; 0 for a single one, which cannot be spared."""
        if self.workers <= 1:
            return 0.0
        return (self.workers - 1) / self.work if self.work > 0 else math.inf


def compute_skew(speeds: Iterable[StageSpeed], window_s: float = math.inf, errors: float = 0.0) -> float:
    """The ratio of the fastest stage's speed, with one worker fewer, to the slowest stage's speed (section 5.3), less
    what chance explains: both are shifted by `errors` standard errors of work that was seen for `window_s`.

    The paper compares stage throughputs. Here a stage is what one set of workers holds, and its speed is relative to
    the work that arrives, so that it covers both ways in which a placement ceases to fit: an auxiliary that does not
    keep up with its primaries, and virtual replicas (or models) in other proportions than their requests. The spared
    worker keeps rounding out: one encoder that is hardly used is not too many. At least 1, and 1 when nothing arrives.
    """
    known = list(speeds)
    slowest = min((stage.shift(window_s, -errors).speed for stage in known), default=math.inf)
    if math.isinf(slowest):
        return 1.0
    fastest = max(stage.shift(window_s, errors).spare_speed for stage in known)
    return max(1.0, fastest / slowest if slowest > 0 else math.inf)
