"""Weights and fair shares of models: what they change under overload, and that they change nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from deployments.assembly.options import ServiceOptions
from deployments.assembly.simulation import SimulationSetup, simulate
from dispatch import DispatchOptions, IlpDispatcher
from tests.dispatch.cluster import request, workers
from tests.dispatch.policies.scenes import cluster
from tests.profiler.synthetic import EDC_BYTES, SHAPES, cost_model, step_seconds
from tridentserve.engine.simulated import SimulationOptions, SimulationResult, TimedRequest
from tridentserve.protocols import ClusterView
from tridentserve.requests import RequestSpec, Shape

MIDDLE, LARGE = SHAPES[1], SHAPES[2]
STEPS, DURATION_S, GPUS = 20, 40.0, 4


def overload(seed: int, slo_s: float, **sizes: Shape) -> list[TimedRequest]:
    """Requests for each model that would keep all workers busy alone."""
    rng = Random(seed)
    numbers = {model: round(DURATION_S * GPUS / (STEPS * step_seconds(size, 1))) for model, size in sizes.items()}
    arrivals = [
        (rng.uniform(0, DURATION_S), RequestSpec(f"{model}-{index}", model, sizes[model], STEPS, slo_s=slo_s))
        for model, number in numbers.items()
        for index in range(number)
    ]
    return sorted(arrivals, key=lambda arrival: arrival[0])


def serve(arrivals: list[TimedRequest], options: DispatchOptions) -> SimulationResult:
    """On workers that hold both models."""
    specs = cluster(GPUS, memory_bytes=6 * EDC_BYTES)
    engine = SimulationOptions(keep_plans=True)
    return simulate(arrivals, SimulationSetup(specs, cost_model, ServiceOptions(dispatch=options), engine=engine))


def list_starts(result: SimulationResult) -> list[tuple[float, tuple[str, ...], tuple[str, ...]]]:
    return [(plan.start_s, plan.workers, plan.request_ids) for plan in result.plans]


def count_on_time(result: SimulationResult) -> Counter[str]:
    return Counter(each.spec.model for each in result.requests if each.slo_met)


def measure_shares(result: SimulationResult, since_s: float = 10.0) -> dict[str, float]:
    """Shares of the GPU-seconds while requests arrive, once both models have waiting ones."""
    given: Counter[str] = Counter()
    for plan in result.plans:
        milliseconds = 1000 * (min(DURATION_S, plan.end_s) - max(since_s, plan.start_s))
        given[plan.model] += len(plan.workers) * max(0, round(milliseconds))
    return {model: value / given.total() for model, value in given.items()}


@pytest.mark.parametrize("seed", [1, 2])
def test_under_overload_the_model_of_more_weight_has_more_on_time(seed: int) -> None:
    arrivals = overload(seed, 4.0, one=LARGE, two=LARGE)
    for heavy, light in (("one", "two"), ("two", "one")):
        counts = count_on_time(serve(arrivals, DispatchOptions(request_weights={heavy: 2.0})))
        assert counts[heavy] > 1.5 * counts[light]


@pytest.mark.parametrize("seed", [1, 2])
def test_under_overload_requests_of_a_higher_priority_have_more_on_time(seed: int) -> None:
    """Also beside others of their own model and size."""
    plain = overload(seed, 4.0, one=LARGE, two=LARGE)
    raised = [(at_s, replace(spec, model="one", priority=1 if spec.model == "two" else 0)) for at_s, spec in plain]
    on_time = Counter(each.spec.priority for each in serve(raised, DispatchOptions()).requests if each.slo_met)
    assert on_time[1] > 1.5 * on_time[0]


def test_one_priority_for_all_changes_no_decision() -> None:
    arrivals = overload(3, 4.0, one=LARGE, two=LARGE)
    raised = [(at_s, replace(spec, priority=2)) for at_s, spec in arrivals]
    assert list_starts(serve(raised, DispatchOptions())) == list_starts(serve(arrivals, DispatchOptions()))


def test_equal_weights_change_no_decision_and_nor_do_shares_of_one_model() -> None:
    arrivals = overload(3, 4.0, one=LARGE, two=LARGE)
    plain = list_starts(serve(arrivals, DispatchOptions()))
    assert list_starts(serve(arrivals, DispatchOptions(request_weights={"one": 1.0, "two": 1.0}))) == plain
    assert list_starts(serve(arrivals, DispatchOptions(fair_shares={"one": 0.1}))) == plain


@pytest.mark.parametrize("slo_s", [4.0, 20.0])
@pytest.mark.parametrize(("one", "two"), [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0)])
def test_models_that_compete_have_gpu_seconds_by_their_shares(one: float, two: float, slo_s: float) -> None:
    """Whether requests are hopeless (a deadline of 4 s) or not, and although those of `two` are much shorter."""
    options = DispatchOptions(fair_shares={"one": one, "two": two})
    shares = measure_shares(serve(overload(4, slo_s, one=LARGE, two=MIDDLE), options))
    assert shares["one"] == pytest.approx(one / (one + two), abs=0.08)


def test_no_worker_idles_because_of_a_share() -> None:
    options = DispatchOptions(fair_shares={"one": 0.01, "two": 1.0})
    both = [f"{model}:EDC" for model in ("one", "two")]
    alone = [request(f"r{i}", LARGE, 3.0, model="one") for i in range(8)]
    for dispatcher in (IlpDispatcher(cost_model(), options), IlpDispatcher(cost_model())):
        view = ClusterView(0.0, alone, (), workers(4, *both, memory_bytes=6 * EDC_BYTES))
        decisions = dispatcher.decide(view)
        assert len({worker for each in decisions.assignments for worker in each.diffuse}) == 4
    crowded = [*alone, request("other", LARGE, 3.0, model="two")]
    dispatcher = IlpDispatcher(cost_model(), options)
    for now_s in (0.0, 1.0, 2.0):
        view = ClusterView(now_s, crowded, (), workers(4, *both, memory_bytes=6 * EDC_BYTES))
        decisions = dispatcher.decide(view)
        assert len({worker for each in decisions.assignments for worker in each.diffuse}) == 4


def test_what_a_model_has_while_it_is_alone_is_not_held_against_it() -> None:
    dispatcher = IlpDispatcher(cost_model(), DispatchOptions(fair_shares={"one": 1.0, "two": 1.0}))
    both = workers(1, "one:EDC", "two:EDC", memory_bytes=6 * EDC_BYTES)
    dispatcher.decide(ClusterView(0.0, [request("alone", LARGE, model="one")], (), both))
    # The shorter request of `one` goes first, as it would without shares.
    pending = [request("r1", MIDDLE, 9.0, model="one"), request("r2", LARGE, 9.0, model="two")]
    (first,) = dispatcher.decide(ClusterView(1.0, pending, (), both)).assignments
    assert first.request_ids == ("r1",)
    (second,) = dispatcher.decide(ClusterView(2.0, pending, (), both)).assignments
    assert second.request_ids == ("r2",)
