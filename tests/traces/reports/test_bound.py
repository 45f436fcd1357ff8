"""The bound against brute force over all subsets, and against schedules that exist."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler import CostModel
from tests.profiler.synthetic import SHAPES, cost_model
from traces.reports.bound import TimedJob, bound_makespan, bound_on_time, count_most_on_time, find_least_gpu_seconds
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.estimation.plan_estimates import stage_seconds
from tridentserve.stages import Stage

jobs_strategy = st.lists(
    st.builds(
        lambda arrival, slack, work: TimedJob(float(arrival), float(arrival + slack), work / 4),
        st.integers(0, 12),
        st.integers(1, 6),
        st.integers(0, 20),
    ),
    max_size=7,
)


def fits(jobs: tuple[TimedJob, ...], num_gpus: int) -> bool:
    """True when the work of these jobs fits in every window."""
    return all(
        sum(job.gpu_seconds for job in jobs if job.arrival_s >= a and job.deadline_s <= b) <= num_gpus * (b - a)
        for a in {job.arrival_s for job in jobs}
        for b in {job.deadline_s for job in jobs}
        if a < b
    )


def best_subset(jobs: list[TimedJob], num_gpus: int) -> int:
    sizes = range(len(jobs), 0, -1)
    return next((n for n in sizes if any(fits(subset, num_gpus) for subset in combinations(jobs, n))), 0)


@given(jobs_strategy, st.integers(1, 3), st.integers(1, 20))
def test_never_below_the_best_subset_and_a_finer_grid_is_tighter(
    jobs: list[TimedJob], num_gpus: int, slots: int
) -> None:
    exact = count_most_on_time(jobs, num_gpus)
    assert best_subset(jobs, num_gpus) <= exact <= count_most_on_time(jobs, num_gpus, max_slots=slots) <= len(jobs)


@given(jobs_strategy, st.integers(1, 3))
def test_all_jobs_exactly_when_all_windows_fit(jobs: list[TimedJob], num_gpus: int) -> None:
    assert (count_most_on_time(jobs, num_gpus) == len(jobs)) == fits(tuple(jobs), num_gpus)


def test_overload_is_counted_in_cheapest_jobs() -> None:
    """10 s on 2 GPUs hold 20 GPU-seconds: ten jobs of 1 and one of the jobs of 8."""
    jobs = [TimedJob(0.0, 10.0, 1.0)] * 10 + [TimedJob(0.0, 10.0, 8.0)] * 5
    assert count_most_on_time(jobs, 2) == 11


def latency_s(times: CostModel, spec: RequestSpec, degree: int) -> float:
    return sum(stage_seconds(times, spec, stage, degree) for stage in Stage)


@given(st.sampled_from(SHAPES), st.integers(1, 30), st.floats(0.01, 5.0))
def test_work_within_the_slo_is_a_lower_bound(shape: Shape, steps: int, scale: float) -> None:
    times = cost_model()
    spec = RequestSpec("r", "one", shape, steps)
    slo_s = scale * latency_s(times, spec, 1)
    least = find_least_gpu_seconds(spec, slo_s, times)
    ends_s = sum(stage_seconds(times, spec, stage) for stage in (Stage.ENCODE, Stage.DECODE))
    diffuse_s = {k: stage_seconds(times, spec, Stage.DIFFUSE, k) for k in times.degrees("one", Stage.DIFFUSE)}
    costs = [ends_s + k * seconds for k, seconds in diffuse_s.items() if ends_s + seconds <= slo_s]
    assert (least is None) == (not costs)
    if least is not None:
        assert 0 < least <= min(costs) * (1 + 1e-9)


def test_a_tight_deadline_costs_more_than_a_loose_one() -> None:
    """At degree 1 alone D is cheapest; where only the widest degree is in time, its GPU-seconds count."""
    times = cost_model()
    spec = RequestSpec("r", "one", SHAPES[-1], 20)
    widest = times.degrees("one", Stage.DIFFUSE)[-1]
    fastest_s = stage_seconds(times, spec, Stage.DIFFUSE, widest) + sum(
        stage_seconds(times, spec, stage) for stage in (Stage.ENCODE, Stage.DECODE)
    )
    loose = find_least_gpu_seconds(spec, 1e6, times)
    tight = find_least_gpu_seconds(spec, fastest_s, times)
    assert loose is not None
    assert tight is not None
    assert tight >= widest * stage_seconds(times, spec, Stage.DIFFUSE, widest)
    assert tight > loose
    assert find_least_gpu_seconds(spec, 0.99 * fastest_s, times) is None


@given(
    st.lists(st.tuples(st.floats(0, 20), st.sampled_from(SHAPES), st.sampled_from((1, 2, 4))), min_size=1, max_size=25),
    st.floats(1.0, 4.0),
)
def test_no_list_schedule_beats_the_bound(trace: list[tuple[float, Shape, int]], scale: float) -> None:
    """First come, first served on 4 GPUs, each request on as many as it asks for."""
    times, free_at_s, on_time = cost_model(), [0.0] * 4, 0
    arrivals = []
    for index, (arrival_s, shape, degree) in enumerate(sorted(trace, key=lambda entry: entry[0])):
        spec = RequestSpec(f"r{index}", "one", shape, 20)
        slo_s = scale * latency_s(times, spec, 4)
        free_at_s.sort()
        end_s = max(arrival_s, free_at_s[degree - 1]) + latency_s(times, spec, degree)
        free_at_s[:degree] = [end_s] * degree
        on_time += end_s <= arrival_s + slo_s
        arrivals.append((arrival_s, RequestSpec(f"r{index}", "one", spec.shape, 20, slo_s=slo_s)))
    assert on_time <= bound_on_time(arrivals, times, num_gpus=4) <= len(trace)


def test_requests_without_a_deadline_are_on_time_and_hopeless_ones_never() -> None:
    specs = [RequestSpec("a", "one", SHAPES[0], 20), RequestSpec("b", "one", SHAPES[0], 20, slo_s=1e-3)]
    assert bound_on_time([(0.0, spec) for spec in specs], cost_model(), num_gpus=1) == 1


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_many_alike_requests_of_a_long_trace(num_gpus: int) -> None:
    """One GPU-second each, two a second for 1,000 s: one GPU can serve about half, two all."""
    jobs = [TimedJob(second / 2, second / 2 + 5.0, 1.0) for second in range(2000)]
    bound = count_most_on_time(jobs, num_gpus)
    assert bound == 2000 if num_gpus == 2 else 1000 <= bound <= 1020


def test_the_makespan_is_bounded_by_the_work_and_by_the_longest_request() -> None:
    """By hand: D and C are cheapest at degree 1 and alone, and 32 requests are encoded in the time of one."""
    times, spec = cost_model(), RequestSpec("r", "one", SHAPES[-1], 20)
    encode_s, diffuse_s, decode_s = (stage_seconds(times, spec, stage) for stage in Stage)
    widest_s = stage_seconds(times, spec, Stage.DIFFUSE, 4)
    least = encode_s / 32 + diffuse_s + decode_s
    assert bound_makespan([spec] * 40, times, 8) == pytest.approx(40 * least / 8)
    assert bound_makespan([spec], times, 8) == pytest.approx(encode_s + widest_s + decode_s)
    assert bound_makespan([], times, 8) == 0.0
