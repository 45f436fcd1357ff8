"""A model whose D is larger than the memory of a worker: divided among two workers, and streamed on one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lib.compare.large_models import LargeModel

from tests.e2e.conftest import Service, decode_image
from tests.e2e.test_faults import running
from tests.pipelines.models import stock_result
from tests.support import http
from tests.support.waiting import PATIENCE_S, wait_until
from tridentserve.byte_sizes import MIB
from tridentserve.requests import GenerationInputs, Shape

MODEL = "large-flux"
MEMORY_MB = 96
SIDE, STEPS = 128, 2
WORKERS = {"divided": 2, "streamed": 1}


@pytest.fixture(scope="module")
def model(tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> LargeModel:
    """FLUX of many layers."""
    made = LargeModel.make(MODEL, tmp_path_factory.mktemp("large"), layers=24, heads=16, cache=tiny_cache)
    assert made.diffuse_bytes > MEMORY_MB * MIB
    return made


@pytest.fixture(scope="module")
def folder(model: LargeModel) -> Path:
    return model.folder


@pytest.fixture(scope="module", params=list(WORKERS))
def large(
    request: pytest.FixtureRequest,
    serve_url: str,
    tiny_cache: Path,
    model: LargeModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Service]:
    from ray import serve

    from deployments.app import build_app
    from deployments.config.app import AppArgs

    scratch, way = tmp_path_factory.mktemp(request.param), request.param
    args: dict[str, Any] = {
        "models": [{"name": MODEL, "path": str(model.folder), "weights": way, "limits": {"max_side": SIDE}}],
        "profiles": [str(model.table)],
        "cluster": {"workers_per_node": WORKERS[way], "memory_mb": MEMORY_MB, "cpus_per_worker": 0.1},
        "handoff": {"capacity_mb": 1},
        "videos": {"data_dir": str(scratch / "videos")},
        "expected_load": [{"model": MODEL, "width": SIDE, "height": SIDE, "num_inference_steps": STEPS}],
        "replicas": {"host_dir": str(scratch / "host")},
        "cache_dir": str(tiny_cache),
        "decision_log": str(scratch / "decisions.jsonl"),
    }
    serve.run(build_app(AppArgs.model_validate(args)), name=way, route_prefix=f"/{way}")
    yield Service(f"{serve_url}/{way}", scratch / "decisions.jsonl", args)
    serve.delete(way)


def generate(large: Service, seed: int, **more: Any) -> dict[str, Any]:
    return large.generate(
        prompt="a red circle", size=f"{SIDE}x{SIDE}", seed=seed, num_inference_steps=STEPS, guidance_scale=4.0, **more
    )


def expect(folder: Path, seed: int) -> np.ndarray[Any, Any]:
    inputs = GenerationInputs("a red circle", Shape(SIDE, SIDE), STEPS, guidance_scale=4.0, seed=seed)
    return np.asarray(stock_result(folder, inputs, "pil")[0]).astype(int)


def test_its_images_are_those_of_the_stock_pipeline(large: Service, folder: Path) -> None:
    image = decode_image(generate(large, 1)["data"][0]["b64_json"])
    assert np.abs(image.astype(int) - expect(folder, 1)).max() <= 1


def test_requests_at_once_lose_nothing(large: Service, folder: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda seed: generate(large, seed), range(2)))
    for seed, answer in enumerate(answers):
        image = decode_image(answer["data"][0]["b64_json"])
        assert np.abs(image.astype(int) - expect(folder, seed)).max() <= 1


@pytest.mark.parametrize("large", ["divided"], indirect=True)
def test_a_worker_that_is_killed_costs_a_retry(large: Service) -> None:
    """The others of its unit wait for it, and the request is run again from its last checkpoint or its beginning."""
    steps = 6
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            http.post,
            f"{large.url}/v1/images/generations",
            json={"prompt": "long", "size": f"{SIDE}x{SIDE}", "num_inference_steps": steps, "request_id": "killed"},
        )
        wait_until(lambda: running(large, "killed"), "the request runs")
        os.kill(list_worker_processes()[-1], signal.SIGKILL)
        answer = waiting.result(timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert any(decision["event"]["kind"] == "worker_lost" for decision in large.decisions())
    generate(large, 3)


def list_worker_processes() -> list[int]:
    """The processes of the workers that hold the large model."""
    import ray
    from ray.util.state import list_actors

    actors = list_actors(address=ray.get_runtime_context().gcs_address, detail=True)
    return [
        actor.pid
        for actor in actors
        if actor.class_name == "StageWorker" and actor.state == "ALIVE" and actor.pid and MODEL in str(actor.repr_name)
    ]
