"""`--quick` of the benchmarks that need Ray. Where they can share what takes long to start, they do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import Service
from tests.scripts.quick_runs import run_quick

pytestmark = pytest.mark.timeout(1000)  # beyond the patience of `run_quick`


@pytest.mark.parametrize("script", ["bench_engine", "bench_batching"])
def test_on_the_cluster_of_the_tests(script: str, ray_cluster: None, tiny_cache: Path, tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    run_quick(
        script, tmp_path, environment=os.environ | {"RAY_ADDRESS": address, "TRIDENTSERVE_CACHE": str(tiny_cache)}
    )


def test_overhead_on_a_service_of_its_own(tmp_path: Path) -> None:
    run_quick("bench_overhead", tmp_path)


def test_requests_are_preempted_on_a_service_of_its_own(tmp_path: Path) -> None:
    assert run_quick("demo_preemption", tmp_path)["max_difference"] <= 1


def test_the_simulator_compared_with_the_service_of_the_tests(service: Service, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    # The first model is the one that is asked for: one on a single worker, whatever the service measures meanwhile.
    models = sorted(service.args["models"], key=lambda model: bool(model["name"] != "tiny-sd3"))
    args = service.args | {"models": models}
    app = {"name": "tridentserve", "import_path": "deployments.app:build_app", "args": args}
    config.write_text(yaml.safe_dump({"applications": [app]}))
    result = run_quick("compare_simulation", tmp_path, "--config", str(config), "--url", service.url)
    assert [row["trace"] for row in result["rows"]] == ["even", "poisson", "bursty"]
