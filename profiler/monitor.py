"""The Monitor: what arrived and what was done in a sliding window, and how well the placement still fits that.

TridentServe, arXiv 2510.02838, sections 5.1 ("Monitor") and 5.3 ("Adjust-on-Dispatch"). Pure: time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tridentserve.errors import ConfigError
from tridentserve.protocols import StageReport
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import PlacementType, Stage

# The paper sets the window per model, as models differ in speed.
DEFAULT_WINDOW_S = 60.0
# A window with fewer arrivals reaches further back, up to this many times its length: a few requests are chance.
DEFAULT_MIN_ARRIVALS = 150
_STRETCH = 5.0
# A rate counts as measured from this many requests in the window.
DEFAULT_MIN_REQUESTS = 8

_ServedKind = tuple[str, PlacementType]


@dataclass(frozen=True, slots=True, order=True)
class WorkKind:
    """Requests that cost the same."""

    model: str
    shape: Shape
    num_inference_steps: int


@dataclass(slots=True)
class _Total:
    """Whole numbers, so that what is added and taken away again leaves nothing behind."""

    requests: int = 0
    gpu_ns: int = 0


class Monitor:
    """Counts arrivals and finished stages per model over its window. Each call costs O(1), amortised."""

    def __init__(
        self,
        window_s: Mapping[str, float] | None = None,
        default_window_s: float = DEFAULT_WINDOW_S,
        min_requests: int = DEFAULT_MIN_REQUESTS,
        min_arrivals: int = DEFAULT_MIN_ARRIVALS,
    ) -> None:
        """`window_s`: per model, `default_window_s` for others. Where fewer than `min_arrivals` came in that time, the
        load is taken over a longer one, up to five times. Raises `ConfigError` for windows not above 0."""
        self._window_s = dict(window_s or {})
        self._default_window_s = default_window_s
        self._min_requests = min_requests
        self._min_arrivals = min_arrivals
        for name, seconds in [*self._window_s.items(), ("default", default_window_s)]:
            _check_window(name, seconds)
        self._arrivals: dict[str, deque[tuple[float, WorkKind, int]]] = {}
        self._arrived: dict[str, dict[WorkKind, int]] = {}
        self._reports: dict[str, deque[tuple[float, PlacementType, Stage, int, int]]] = {}
        self._done: dict[_ServedKind, dict[Stage, _Total]] = {}

    def arrived(self, spec: RequestSpec, now_s: float) -> None:
        """A request has come in. Each of its outputs counts."""
        kind = WorkKind(spec.model, spec.shape, spec.num_inference_steps)
        counts = self._arrived.setdefault(spec.model, {})
        counts[kind] = counts.get(kind, 0) + spec.num_outputs
        self._arrivals.setdefault(spec.model, deque()).append((now_s, kind, spec.num_outputs))
        self._forget(spec.model, now_s)

    def stage_finished(self, report: StageReport) -> None:
        """A stage has run, at `report.span.end_s`."""
        gpu_ns = max(0, round(report.span.gpu_seconds * 1e9))
        stages = self._done.setdefault((report.model, report.kind), {})
        total = stages.setdefault(report.span.stage, _Total())
        total.requests += report.requests
        total.gpu_ns += gpu_ns
        entry = (report.span.end_s, report.kind, report.span.stage, report.requests, gpu_ns)
        self._reports.setdefault(report.model, deque()).append(entry)
        self._forget(report.model, report.span.end_s)

    def set_window(self, model: str, window_s: float | None) -> None:
        """Set a model's window from now on; None: the common window. Raises `ConfigError` as the constructor does."""
        self._window_s.pop(model, None)
        if window_s is not None:
            self._window_s[model] = _check_window(model, window_s)

    def drop(self, model: str) -> None:
        """Forget all that was counted of a model."""
        self._arrivals.pop(model, None)
        self._arrived.pop(model, None)
        self._reports.pop(model, None)
        for kind in [kind for kind in self._done if kind[0] == model]:
            del self._done[kind]

    def measure_load(self, now_s: float) -> dict[WorkKind, float]:
        """Outputs asked for per second, averaged over `choose_load_window_s`: a young window counts as a quiet one. In
        a fixed order."""
        return {
            kind: self._arrived[model][kind] / window_s
            for model in sorted(self._arrived)
            for window_s in [self.choose_load_window_s(model, now_s)]
            for kind in sorted(self._arrived[model])
        }

    def choose_load_window_s(self, model: str, now_s: float) -> float:
        """The seconds before now over which the load of a model is counted."""
        self._forget(model, now_s)
        arrivals = self._arrivals.get(model)
        return max(self._find_window_s(model), now_s - arrivals[0][0] if arrivals else 0.0)

    def measure_rates(self, now_s: float) -> dict[_ServedKind, float]:
        """The measured v of section 5.1: requests per second of work and worker, per model and placement type.

        One over the GPU-seconds that a request takes there, over all stages of the type. Types that have done fewer
        than `min_requests` of one of their stages are left out. A D that was stopped and resumed counts each time;
        where the type has another stage, that one counts the requests.
        """
        for model in self._reports:
            self._forget(model, now_s)
        rates: dict[_ServedKind, float] = {}
        for (model, kind), stages in sorted(self._done.items()):
            totals = [stages.get(stage, _Total()) for stage in sorted(kind.stages)]
            requests = min(total.requests for total in totals)
            gpu_ns = sum(total.gpu_ns for total in totals)
            if requests >= self._min_requests and gpu_ns > 0:
                rates[model, kind] = requests / (gpu_ns / 1e9)
        return rates

    def _find_window_s(self, model: str) -> float:
        return self._window_s.get(model, self._default_window_s)

    def _forget(self, model: str, now_s: float) -> None:
        """Drop what is older than the model's window, but the last `min_arrivals` only when they are much older."""
        oldest_s, longest_s = now_s - self._find_window_s(model), now_s - _STRETCH * self._find_window_s(model)
        arrivals = self._arrivals.get(model, deque())
        while arrivals and arrivals[0][0] <= (oldest_s if len(arrivals) > self._min_arrivals else longest_s):
            _, work, outputs = arrivals.popleft()
            counts = self._arrived[model]
            counts[work] -= outputs
            if not counts[work]:
                del counts[work]
        reports = self._reports.get(model, deque())
        while reports and reports[0][0] <= oldest_s:
            _, kind, stage, requests, gpu_ns = reports.popleft()
            total = self._done[model, kind][stage]
            total.requests -= requests
            total.gpu_ns -= gpu_ns


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

    def compute_relative_error(self, window_s: float) -> float:
        """The standard error of `work`, as a share of it, when it was seen for so long and requests come independently:
        few heavy requests say less than many light ones."""
        return math.sqrt(self.squared_work / window_s) / self.work if self.work > 0 else math.inf

    @property
    def spare_speed(self) -> float:
        """The speed with one worker fewer; 0 for a single one, which cannot be spared."""
        if self.workers <= 1:
            return 0.0
        return (self.workers - 1) / self.work if self.work > 0 else math.inf


def compute_skew(speeds: Iterable[StageSpeed]) -> float:
    """The ratio of the fastest stage's speed, with one worker fewer, to the slowest stage's speed (section 5.3).

    The paper compares stage throughputs. Here a stage is what one set of workers holds, and its speed is relative to
    the work that arrives, so that it covers both ways in which a placement ceases to fit: an auxiliary that does not
    keep up with its primaries, and virtual replicas (or models) in other proportions than their requests. The spared
    worker keeps rounding out: one encoder that is hardly used is not too many. At least 1, and 1 when nothing arrives.
    """
    known = list(speeds)
    slowest = min((stage.speed for stage in known), default=math.inf)
    if math.isinf(slowest):
        return 1.0
    fastest = max(stage.spare_speed for stage in known)
    return max(1.0, fastest / slowest if slowest > 0 else math.inf)


class SkewTrigger:
    """Says when to plan anew: the skew reached `ratio` and has not been below `release` for `hold_s` since, at most
    every `min_interval_s` (two thresholds and a time, so that noise about one of them does not flap)."""

    def __init__(self, ratio: float, release: float, hold_s: float, min_interval_s: float) -> None:
        if not 1 <= release <= ratio:
            raise ConfigError(f"the trigger's release is {release} and its ratio {ratio}; give 1 <= release <= ratio")
        self._ratio = ratio
        self._release = release
        self._hold_s = hold_s
        self._min_interval_s = min_interval_s
        self._since_s: float | None = None
        self._last_s = -math.inf

    def update(self, skew: float, now_s: float) -> bool:
        """True when a new placement should be planned now."""
        if skew < self._release:
            self._since_s = None
        elif skew >= self._ratio and self._since_s is None:
            self._since_s = now_s
        held = self._since_s is not None and now_s - self._since_s >= self._hold_s
        if not held or now_s - self._last_s < self._min_interval_s:
            return False
        self._last_s = now_s
        return True

    def rest(self, now_s: float) -> None:
        """A plan was made for another cause: the next one waits for `min_interval_s` too."""
        self._since_s = None
        self._last_s = now_s
