from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.requests import TraceRequest
from traces.workloads.mixes import draw, load_mix
from traces.workloads.named import MODELS, WORKLOADS, make_workload, rescale
from tridentserve.errors import ConfigError

NAMES = [(name, model) for name, workload in WORKLOADS.items() for model in (MODELS if workload.per_model else (None,))]


@pytest.mark.parametrize(("name", "model"), NAMES)
def test_a_workload_is_the_same_for_a_seed_and_another_for_another(name: str, model: str | None) -> None:
    requests = make_workload(name, model, seed=1, duration_s=600.0)
    assert requests == make_workload(name, model, seed=1, duration_s=600.0)
    assert requests != make_workload(name, model, seed=2, duration_s=600.0)
    times_s = [request.timestamp_s for request in requests]
    assert times_s == sorted(times_s)
    assert times_s[-1] < 600
    assert len({request.request_id for request in requests}) == len(requests)
    rate_per_s = WORKLOADS[name].load_mixes(model)[0].rate_per_s
    assert len(requests) == pytest.approx(600 * rate_per_s, abs=1 + 4 * math.sqrt(600 * rate_per_s))
    assert {request.model for request in requests} == set(WORKLOADS[name].load_mixes(model)[0].models)


def test_steady_arrivals_are_constant_unless_others_are_asked_for() -> None:
    requests = make_workload("heavy", "flux.1-dev", duration_s=300.0)
    assert [request.timestamp_s for request in requests] == pytest.approx(
        [index / 1.5 for index in range(450)], abs=1e-6
    )
    poisson = make_workload("heavy", "flux.1-dev", duration_s=300.0, arrivals="poisson", rate_scale=2.0)
    gaps_s = {round(after.timestamp_s - before.timestamp_s, 3) for before, after in pairwise(poisson)}
    assert len(gaps_s) > 100
    assert len(poisson) == pytest.approx(900, abs=120)
    assert {request.num_inference_steps for request in make_workload("light", "flux.1-dev", num_inference_steps=9)} == {
        9
    }


def largest_share(requests: list[TraceRequest]) -> float:
    return sum(request.height >= 3072 for request in requests) / len(requests)


def test_dynamic_has_phases_of_all_three_mixes() -> None:
    """Shares of large images are 0.33, 0.54 and 0.70 in the mixes: phases stand apart, and none is all of it."""
    requests = make_workload("dynamic", "flux.1-dev", seed=4, rate_scale=6)
    minutes = [[one for one in requests if minute <= one.timestamp_s / 60 < minute + 1] for minute in range(30)]
    shares = sorted(largest_share(minute) for minute in minutes)
    assert shares[0] < 0.37
    assert shares[-1] > 0.66
    assert largest_share(requests) == pytest.approx(0.52, abs=0.08)


def test_proprietary_is_diurnal_and_has_as_many_requests_as_steady() -> None:
    requests = make_workload("proprietary", "sd3-medium", seed=2)
    assert len(requests) == len(make_workload("light", "sd3-medium")) == 36_000
    per_minute = Counter(int(request.timestamp_s // 60) for request in requests)
    # Two tides in 30 minutes: troughs at 0, 15 and 30, peaks at 7.5 and 22.5.
    peak = per_minute[7] + per_minute[22]
    trough = per_minute[0] + per_minute[14] + per_minute[15] + per_minute[29]
    assert peak / (trough / 2) == pytest.approx(4.0, rel=0.15)


def test_tetriserve_has_equal_numbers_and_fixed_deadlines() -> None:
    requests = make_workload("tetriserve-uniform", deadline_scale=1.5)
    assert {(one.height, one.slo_ms) for one in requests} == {(256, 2250), (512, 3000), (1024, 4500), (2048, 7500)}
    counts = Counter(one.height for one in requests)
    assert max(counts.values()) - min(counts.values()) <= 1
    skewed = Counter(one.height for one in make_workload("tetriserve-skewed", duration_s=36_000.0))
    weights = {size: math.exp(size**2 / 2048**2) for size in skewed}
    for size, count in skewed.items():
        assert count / skewed.total() == pytest.approx(weights[size] / sum(weights.values()), rel=0.01)


def test_the_other_systems_workloads() -> None:
    videos = Counter(one.num_frames > 1 for one in make_workload("genserve"))
    assert abs(videos[True] - videos[False]) <= 3
    sizes = Counter((one.height, one.num_inference_steps) for one in make_workload("dit-serve", duration_s=16_000.0))
    assert set(sizes) == {(height, steps) for height in (240, 368, 480, 720) for steps in (20, 40, 80, 120)}
    assert max(sizes.values()) - min(sizes.values()) <= 2
    assert {one.width for one in make_workload("patchedserve", duration_s=60.0)} == {512, 768, 1024}
    assert {name: WORKLOADS[name].slo_scale() for name in ("patchedserve", "genserve")} == {
        "patchedserve": 5.0,
        "genserve": None,
    }


@given(st.integers(1, 30), st.integers(1, 100), st.integers(0, 2**32))
def test_rescale_keeps_what_is_asked_and_when(count: int, wanted: int, seed: int) -> None:
    trace = draw(load_mix("flux.1-dev-light"), [1.5 * index for index in range(count)], seed=0)
    scaled = rescale(trace, wanted, seed)
    assert len(scaled) == wanted
    assert [one.request_id for one in scaled] == [str(index) for index in range(wanted)]
    times_s = [one.timestamp_s for one in scaled]
    assert times_s == sorted(times_s)
    assert times_s[-1] <= trace[-1].timestamp_s
    # Each request comes from the one that came last before it (its seed differs from all others').
    for one in scaled:
        source = trace[int(one.seed or 0)]
        assert source.timestamp_s <= one.timestamp_s <= source.timestamp_s + 1.5
        assert (source.height, source.prompt) == (one.height, one.prompt)
    per_request = Counter(one.seed for one in scaled)
    assert {wanted // count, -(-wanted // count)} >= {per_request[one.seed] for one in trace}


def test_bad_arguments_say_what_there_is() -> None:
    with pytest.raises(ConfigError, match="no workload is named 'lite'; there are: light, medium"):
        make_workload("lite")
    with pytest.raises(ConfigError, match="needs a model, one of sd3-medium"):
        make_workload("light")
    with pytest.raises(ConfigError, match=r"'genserve' is for cogvideox1\.5-5b and sd3-medium, not flux.1-dev"):
        make_workload("genserve", "flux.1-dev")
    with pytest.raises(ConfigError, match="rate_scale must be above 0"):
        make_workload("genserve", rate_scale=0)
    with pytest.raises(ConfigError, match="a trace of 0 requests cannot be scaled to 3"):
        rescale([], 3)
