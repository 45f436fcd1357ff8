"""Bounds that hold for every schedule, which say how far a policy is from what can be had: the most requests of a trace
that can finish on time, and the earliest end of a set of requests that are all there at time zero.

The requests on time are bounded by windows: for every window [a, b) the GPU-seconds of the on-time requests that arrive
at or after a and are due by b must fit in the N (b - a) that N GPUs have. A request counts with the least that an on-
time run of it can take, and as a fraction where that helps, so the bound is never too low. Neither bound sees memory,
nodes, transfers, loads or integer workers: what is possible may be less.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pulp

from tridentserve.errors import ProfileError
from tridentserve.protocols import StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.stages import Stage

# Batches that a request may be part of: a share of a batch costs less than a run of its own.
_BATCHES = (1, 2, 4, 8, 16, 32)
# Latencies are sums of floats: a request that needs its whole SLO may still be on time.
_SLACK = 1 + 1e-9
# The solver's tolerance, in requests.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class TimedJob:
    """A request as the bound sees it: `gpu_seconds` is the least that any on-time run of it takes."""

    arrival_s: float
    deadline_s: float
    gpu_seconds: float


@dataclass(frozen=True, slots=True)
class _StageChoice:
    """One way to run a stage, or all stages: seconds on the request's critical path, and GPU-seconds."""

    seconds: float
    gpu_seconds: float


def bound_on_time(arrivals: Iterable[tuple[float, RequestSpec]], times: StageTimes, num_gpus: int) -> int:
    """No schedule of these requests on `num_gpus` GPUs, with these stage times, finishes more of them on time.

    Arrivals are (seconds, request), each request with its `slo_s`; one without is taken to be always on time. Batches
    are counted up to 32 requests of one kind. Raises `ProfileError` for what was not profiled.
    """
    least: dict[tuple[object, ...], float | None] = {}
    jobs: list[TimedJob] = []
    always = 0
    for arrival_s, spec in arrivals:
        if spec.slo_s is None:
            always += 1
            continue
        key = (spec.model, spec.shape, spec.num_inference_steps, spec.num_outputs, spec.slo_s)
        if key not in least:
            least[key] = find_least_gpu_seconds(spec, spec.slo_s, times)
        gpu_seconds = least[key]
        if gpu_seconds is not None:
            jobs.append(TimedJob(arrival_s, arrival_s + spec.slo_s, gpu_seconds))
    return always + count_most_on_time(jobs, num_gpus)


def bound_makespan(specs: Iterable[RequestSpec], times: StageTimes, num_gpus: int) -> float:
    """No schedule of these requests on `num_gpus` GPUs, with these stage times, has all of them finished earlier, in
    seconds from when all are there.

    It is the larger of two times. In the one, all GPUs are busy all the time, and each stage of each request takes the
    fewest GPU-seconds of any degree and batch. In the other, the longest request alone has each stage at its fastest
    degree and batch. Batches are counted up to 32 requests of one kind. Raises `ProfileError` for what was not
    profiled.
    """
    least: dict[tuple[object, ...], _StageChoice] = {}
    gpu_seconds, longest_s = 0.0, 0.0
    for spec in specs:
        key = (spec.model, spec.shape, spec.num_inference_steps, spec.num_outputs)
        if key not in least:
            stages = [_list_choices(spec, stage, times) for stage in Stage]
            least[key] = _StageChoice(
                seconds=sum(min(way.seconds for way in ways) for ways in stages),
                gpu_seconds=sum(min(way.gpu_seconds for way in ways) for ways in stages),
            )
        gpu_seconds += least[key].gpu_seconds
        longest_s = max(longest_s, least[key].seconds)
    return max(gpu_seconds / num_gpus, longest_s)


def find_least_gpu_seconds(spec: RequestSpec, slo_s: float, times: StageTimes) -> float | None:
    """The least GPU-seconds of a run of all stages within `slo_s`; None when not even the fastest run is on time.

    Each stage may change its way (degree and batch) at any moment, which is more than an engine can do. By duality the
    result is the largest of min(GPU-seconds + price x seconds) - price x SLO over all prices of a second.
    """
    stages = [_list_choices(spec, stage, times) for stage in Stage]
    if sum(min(way.seconds for way in ways) for ways in stages) > slo_s * _SLACK:
        return None
    prices = {0.0, *(price for ways in stages for price in _list_exchange_rates(ways))}

    def at(price: float) -> float:
        return sum(min(way.gpu_seconds + price * way.seconds for way in ways) for ways in stages) - price * slo_s

    return max(map(at, prices))


def _list_choices(spec: RequestSpec, stage: Stage, times: StageTimes) -> list[_StageChoice]:
    calls = spec.num_inference_steps if stage is Stage.DIFFUSE else 1
    ways = []
    for degree in times.degrees(spec.model, stage):
        try:
            alone_s = calls * times.seconds(spec.model, stage, spec.shape, degree, spec.num_outputs)
        except ProfileError:
            continue  # wide sizes may be profiled at wide degrees alone
        for batch in _BATCHES:
            batch_s = calls * times.seconds(spec.model, stage, spec.shape, degree, batch * spec.num_outputs)
            # No member of a batch is taken to wait for the others: some engine may hand out its result first.
            ways.append(_StageChoice(min(alone_s, batch_s), degree * batch_s / batch))
    if not ways:
        times.seconds(spec.model, stage, spec.shape)  # raises, and says what to profile
    return ways


def _list_exchange_rates(ways: Sequence[_StageChoice]) -> Iterator[float]:
    """GPU-seconds per second saved between any two ways: the prices at which the cheapest way changes."""
    for slow in ways:
        for fast in ways:
            if fast.seconds < slow.seconds and fast.gpu_seconds > slow.gpu_seconds:
                yield (fast.gpu_seconds - slow.gpu_seconds) / (slow.seconds - fast.seconds)


def count_most_on_time(jobs: Sequence[TimedJob], num_gpus: int, max_slots: int = 200) -> int:
    """The linear program: as many jobs as possible, in fractions, under the windows between all pairs of grid times.

    The grid are up to `max_slots` + 1 of the arrivals and deadlines; arrivals are moved back and deadlines forward to
    it, so a coarser grid gives a looser bound. The windows of all pairs are written as a flow from jobs to the slots
    between neighbouring times: because work may be split at will, one can be met exactly when the other can (earliest
    deadline first is optimal then), and the flow has far fewer coefficients.
    """
    grid = _make_grid(jobs, max_slots)
    classes = Counter(
        (bisect_right(grid, job.arrival_s) - 1, bisect_left(grid, job.deadline_s), job.gpu_seconds)
        for job in jobs
        if job.gpu_seconds > 0
    )
    free = len(jobs) - classes.total()
    if not classes:
        return free
    model = pulp.LpProblem("on_time", pulp.LpMaximize)
    by_slot: list[list[tuple[pulp.LpVariable, float]]] = [[] for _ in grid[1:]]
    objective = []
    for index, ((first, last, gpu_seconds), count) in enumerate(classes.items()):
        parts = [model.add_variable(f"x_{index}_{slot}", lowBound=0) for slot in range(first, last)]
        model += pulp.LpAffineExpression([(part, 1) for part in parts]) <= count
        objective += [(part, 1) for part in parts]
        for slot, part in enumerate(parts, start=first):
            by_slot[slot].append((part, gpu_seconds))
    for slot, work in enumerate(by_slot):
        if work:
            model += pulp.LpAffineExpression(work) <= num_gpus * (grid[slot + 1] - grid[slot])
    model.setObjective(pulp.LpAffineExpression(objective))
    model.solve(pulp.HiGHS(msg=False, threads=1))
    if model.sol_status != pulp.LpSolutionOptimal:
        raise RuntimeError(f"HiGHS did not solve the bound's linear program: {pulp.LpStatus[model.status]}")
    best = float(pulp.value(model.objective))
    return free + min(classes.total(), math.floor(best + _TOLERANCE))


def _make_grid(jobs: Sequence[TimedJob], max_slots: int) -> list[float]:
    """Quantiles of all arrivals and deadlines, the first and the last among them."""
    times_s = sorted({time_s for job in jobs for time_s in (job.arrival_s, job.deadline_s)})
    if len(times_s) <= max_slots + 1:
        return times_s
    return [times_s[round(index * (len(times_s) - 1) / max_slots)] for index in range(max_slots + 1)]
