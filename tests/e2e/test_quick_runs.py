"""`--quick` of the benchmarks that need Ray. Where they can share what takes long to start, they do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import Service
from tests.scripts.quick_runs import ROOT, run_quick

pytestmark = pytest.mark.timeout(1000)  # beyond the patience of `run_quick`


def test_batching_on_the_cluster_of_the_tests(ray_cluster: None, tiny_cache: Path, tmp_path: Path) -> None:
    run_quick("bench_batching", tmp_path, environment=make_environment(tiny_cache))


def test_the_control_plane_on_the_cluster_of_the_tests(ray_cluster: None, tiny_cache: Path, tmp_path: Path) -> None:
    result = run_quick("bench_control_plane", tmp_path, environment=make_environment(tiny_cache))
    assert [(row["workers"], row["failed"]) for row in result["rows"]] == [(8, 0)]


# All parts in two runs: each imports torch, and each shows that what is not asked for is left out.
@pytest.mark.parametrize(
    "parts",
    [("regroup", "handoff", "load", "pause_resume", "service_pause", "join"), ("switch", "shift")],
    ids="-".join,
)
def test_the_engine_on_the_cluster_of_the_tests(
    parts: Sequence[str], ray_cluster: None, tiny_cache: Path, tmp_path: Path
) -> None:
    environment = make_environment(tiny_cache)
    # One policy shows how a shifting load is served; starting another service for the second takes long.
    left_out = r"shift\.wo_switch\."
    run_quick("bench_engine", tmp_path, "--only", *parts, environment=environment, parts=parts, left_out=left_out)


def test_memory_on_the_cluster_of_the_tests(ray_cluster: None, tiny_cache: Path, tmp_path: Path) -> None:
    run_quick("bench_memory", tmp_path, environment=make_environment(tiny_cache), left_out=r"streamed\.")


def make_environment(tiny_cache: Path) -> dict[str, str]:
    """The environment of a benchmark that joins the tests' Ray cluster."""
    import ray

    address = ray.get_runtime_context().gcs_address
    return os.environ | {"RAY_ADDRESS": address, "TRIDENTSERVE_CACHE": str(tiny_cache)}


def test_overhead_of_the_service_of_the_tests(service: Service, tiny_cache: Path, tmp_path: Path) -> None:
    environment = os.environ | {"TRIDENTSERVE_CACHE": str(tiny_cache)}
    run_quick("bench_overhead", tmp_path, "--url", service.url, "--model", "tiny-sd3", environment=environment)


def test_cpu_time_of_requests_to_the_service_of_the_tests(service: Service, tmp_path: Path) -> None:
    result = run_quick("bench_requests", tmp_path, "--url", service.url)
    assert [(row["steps"], row["streamed"]) for row in result["rows"]] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]


def test_consoles_beside_requests_to_the_service_of_the_tests(service: Service, tmp_path: Path) -> None:
    result = run_quick("bench_console", tmp_path, "--url", service.url)
    assert (result["consoles"], result["rounds"]) == (20, 2)
    for name in ("latency_ratio", "mean_latency_ratio"):
        low, high = result[f"{name}_interval"]
        assert low <= result[name] <= high


def test_predictions_of_the_service_of_the_tests(service: Service, tmp_path: Path) -> None:
    result = run_quick("bench_quotes", tmp_path, "--url", service.url)
    assert [row["way"] for row in result["rows"]] == ["simulated", "simulated", "live"]


def test_requests_are_preempted_beside_the_service_of_the_tests(
    service: Service, tiny_cache: Path, tmp_path: Path
) -> None:
    where = ("--serve-url", service.url)
    result = run_quick("demo_preemption", tmp_path, *where, environment=make_environment(tiny_cache))
    assert result["max_difference"] <= 1


def test_a_policy_is_judged_beside_the_service_of_the_tests(service: Service, tiny_cache: Path, tmp_path: Path) -> None:
    options = ("--config", str(ROOT / "deployments" / "tiny.yaml"), "--serve-url", service.url)
    result = run_quick("compare_policies", tmp_path, *options, environment=make_environment(tiny_cache))
    found = [(row["trace"], row["policy"]) for row in result["rows"]]
    assert found == [("poisson", "default"), ("bursty", "default")]
    assert result["requests"] == 6


def test_the_simulator_compared_with_the_service_of_the_tests(service: Service, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    # The first model is the one that is asked for: one on a single worker, whatever the service measures meanwhile.
    models = sorted(service.args["models"], key=lambda model: bool(model["name"] != "tiny-sd3"))
    args = service.args | {"models": models}
    app = {"name": "tridentserve", "import_path": "deployments.app:build_app", "args": args}
    config.write_text(yaml.safe_dump({"applications": [app]}))
    result = run_quick("compare_simulation", tmp_path, "--config", str(config), "--url", service.url)
    assert [row["trace"] for row in result["rows"]] == ["even", "poisson", "bursty"]


@pytest.mark.parametrize("flags", [(), pytest.param(("--video",), marks=pytest.mark.slow)])
def test_what_is_made_at_degree_2_is_judged_beside_the_service_of_the_tests(
    service: Service, tiny_cache: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    where = ("--serve-url", service.url, *flags)
    other = r"rows\.\*\.scores\.(count|relation)" if flags else r"rows\.\*\.scores\.direction"
    result = run_quick("judge_service", tmp_path, *where, environment=make_environment(tiny_cache), left_out=other)
    assert [row["way"] for row in result["rows"]] == ["stock", "degree 2"]
    assert result["rows"][1]["degrees"] == {"2": 3}
    # The encoder of videos makes more of a difference of 1.
    assert result["rows"][1]["max_difference"] <= (64 if flags else 1)
