"""A service whose model is fetched from a hub, and that starts again without it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import decode_image
from tests.e2e.test_faults import worker_handles
from tests.pipelines.models import stock_result
from tests.support import http
from tests.support.hub_server import COMMIT, HubServer, read_repository, run_hub_server
from tests.support.waiting import wait_until
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.requests import GenerationInputs, Shape

MODEL_ID = "some-lab/tiny-sd3"
IMAGE = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 4, "guidance_scale": 4.0, "seed": 5}
INPUTS = GenerationInputs("a red circle", Shape(64, 64), num_inference_steps=4, guidance_scale=4.0, seed=5)


@contextmanager
def serving(serve_url: str, cache: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A service whose Scheduler has this environment, and so have its fetches."""
    from ray import serve

    from deployments import app
    from deployments.config.app import AppArgs
    from deployments.serve.scheduler_deployment import make_scheduler_deployment

    def make(args: AppArgs, cell: int = 0) -> Any:
        options = {"num_cpus": 0.1, "runtime_env": {"env_vars": environment}}
        return make_scheduler_deployment(args, cell).options(ray_actor_options=options)

    monkeypatch.setattr(app, "make_scheduler_deployment", make)
    args = {
        "models": [{"name": "from-hub", "path": MODEL_ID, "profile_as": "tiny-sd3", "limits": {"max_side": 512}}],
        "profiles": ["tiny-cpu"],
        "cluster": {"workers_per_node": 1, "memory_mb": 512, "cpus_per_worker": 0.1},
        "placement": ["EDC"],
        "cache_dir": str(cache),
    }
    serve.run(app.build_app(AppArgs.model_validate(args)), name="hub", route_prefix="/hub")
    try:
        yield f"{serve_url}/hub"
    finally:
        serve.delete("hub")


def draw(url: str) -> np.ndarray[Any, Any]:
    answer = http.post(f"{url}/v1/images/generations", json=IMAGE)
    assert answer.status_code == 200, answer.text
    return decode_image(answer.json()["data"][0]["b64_json"])


def test_a_model_of_the_hub_is_served_and_later_without_it(
    serve_url: str, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ensure_tiny("sd3", tiny_cache)
    repository = read_repository(folder)
    with run_hub_server(HubServer(MODEL_ID, repository)) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        with serving(serve_url, tiny_cache, environment, monkeypatch) as url:
            first = draw(url)
        assert (first == np.asarray(stock_result(folder, INPUTS, "pil")[0])).all()
        assert sum(line.startswith(f"GET /api/models/{MODEL_ID}/revision/main") for line in hub.requests) == 1
        assert len(hub.downloads_of("transformer/diffusion_pytorch_model.safetensors")) == 1
        assert [path.name for path in tmp_path.glob("models--*/snapshots/*")] == [COMMIT]
        hub.requests.clear()
        with serving(serve_url, tiny_cache, environment | {"HF_HUB_OFFLINE": "1"}, monkeypatch) as url:
            assert (draw(url) == first).all()
        assert not hub.requests


@pytest.mark.slow
def test_a_worker_that_comes_back_where_nothing_of_the_model_is_has_it_fetched(
    serve_url: str, tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another node, after that of the worker was lost."""
    weights = "transformer/diffusion_pytorch_model.safetensors"
    with run_hub_server(HubServer(MODEL_ID, read_repository(ensure_tiny("sd3", tiny_cache)))) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        with serving(serve_url, tiny_cache, environment, monkeypatch) as url:
            first = draw(url)
            worker = worker_handles()["n0w0"]
            shutil.rmtree(tmp_path / "hub")
            shutil.rmtree(tiny_cache / "host")
            os.kill(worker.pid, signal.SIGKILL)
            wait_until(lambda: http.get(f"{url}/health").json()["workers"] == 0, "the worker is lost")
            wait_until(lambda: http.get(f"{url}/health").json()["workers"] == 1, "the worker is back")
            assert (draw(url) == first).all()
            assert len(hub.downloads_of(weights)) == 2
