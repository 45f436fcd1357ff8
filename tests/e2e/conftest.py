"""One service for the end-to-end tests: three tiny models on four CPU workers, reached over HTTP and handles."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support import http
from tests.support.decision_log import read_lines
from tests.support.ports import free_port
from tridentserve.pipelines.tiny.build import ensure_tiny

# E, D, D, C of tiny-flux on workers of their own (V3); all of tiny-sd3 (V0) beside the encoder, all of tiny-wan beside
# the decoder.
PLACEMENT: list[dict[str, str]] = [
    {"tiny-flux": "E", "tiny-sd3": "EDC"},
    {"tiny-flux": "D"},
    {"tiny-flux": "D"},
    {"tiny-flux": "C", "tiny-wan": "EDC"},
]


@dataclass(frozen=True)
class Service:
    """The address of the service, the file of its decisions, and its arguments."""

    url: str
    decision_log: Path
    args: dict[str, Any]

    def generate(self, **body: Any) -> dict[str, Any]:
        """The answer to one image request."""
        answer = http.post(f"{self.url}/v1/images/generations", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def num_arrived(self) -> int:
        """The number of requests that have arrived at the scheduler."""
        return sum(decision["event"]["kind"] == "request_arrived" for decision in self.decisions())

    def decisions(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in read_lines(self.decision_log)]


def decode_image(b64_json: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64_json))))


@pytest.fixture(scope="session")
def serve_url(ray_cluster: None) -> Iterator[str]:
    """Where the applications of Ray Serve are reached."""
    from ray import serve

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="session")
def service(serve_url: str, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Service:
    from ray import serve

    from deployments.app import build_app
    from deployments.config.app import AppArgs

    for family in ("flux", "sd3", "wan"):  # the Scheduler would import diffusers for it
        ensure_tiny(family, tiny_cache)
    log = tmp_path_factory.mktemp("service") / "decisions.jsonl"
    args = {
        "models": [
            {"name": "tiny-flux", "tiny": "flux", "limits": {"max_side": 512, "max_steps": 1000}},
            # Steps of random weights differ more from one another than those of a model that was trained.
            {"name": "tiny-sd3", "tiny": "sd3", "limits": {"max_side": 512}, "step_cache_fast": 0.5},
            {"name": "tiny-wan", "tiny": "wan", "limits": {"max_side": 64, "max_frames": 9, "max_steps": 1000}},
        ],
        "profiles": ["tiny-cpu", "tiny-video-cpu"],
        "videos": {"lease_s": 2},
        # All workers may denoise at once, however few cores the machine has.
        "cluster": {"workers_per_node": 4, "memory_mb": 512, "cpus_per_worker": 0.1, "max_denoising": 4},
        "placement": PLACEMENT,
        "scheduler": {"orphan_s": 3},
        "cache_dir": str(tiny_cache),
        "decision_log": str(log),
    }
    app = build_app(AppArgs.model_validate(args))
    serve.run(app, name="tridentserve", route_prefix="/", logging_config={"enable_access_log": False})
    return Service(serve_url, log, args)
