"""A service of two cells: requests go to both, and one whose scheduler is killed loses none of them."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import Service, decode_image
from tests.pipelines.models import make_inputs, stock_result
from tests.support import http
from tests.support.decision_log import read_lines
from tests.support.waiting import PATIENCE_S, wait_until
from tridentserve.pipelines.tiny.build import ensure_tiny

NUM_REQUESTS = 8
# As many plain and as many streamed requests of so many steps keep both cells busy until one of them is lost.
NUM_LONG, STEPS = 3, 150


@dataclass(frozen=True)
class CellService:
    """The service under `/cells`, and the folder of the decision logs."""

    url: str
    folder: Path

    def generate(self, **body: Any) -> dict[str, Any]:
        answer = http.post(f"{self.url}/v1/images/generations", json={"size": "64x64", "seed": 7, **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        """All events of a request."""
        body = {"size": "64x64", "seed": 7, "stream": True, **body}
        with http.stream("POST", f"{self.url}/v1/images/generations", json=body) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines]

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = http.get(f"{self.url}/health").json()
        return found

    def num_running(self, cell: int) -> int:
        """Number of denoising plans that a cell has given out."""
        log = self.folder / f"log.cell{cell}.jsonl"
        effects = (effect for line in read_lines(log) for effect in json.loads(line)["effects"]) if log.exists() else ()
        return sum(effect["kind"] == "run" and "diffuse" in effect["plan"]["stages"] for effect in effects)


@pytest.fixture(scope="module")
def cells(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CellService]:
    """Two cells of two workers each, as a second application."""
    from ray import serve

    from deployments.app import build_app
    from deployments.config.app import AppArgs

    folder = tmp_path_factory.mktemp("cells")
    args: dict[str, Any] = {
        "models": [{"name": "tiny-sd3", "tiny": "sd3", "limits": {"max_side": 256, "max_steps": 1000}}],
        "scheduler": {"cells": 2},
        "cluster": {"nodes": 2, "workers_per_node": 2, "memory_mb": 512, "cpus_per_worker": 0.1, "max_denoising": 2},
        "placement": ["EDC"] * 4,
        "dispatch": {"max_degree": 1},  # as the stock pipeline, bit for bit
        "cache_dir": service.args["cache_dir"],
        "decision_log": str(folder / "log.jsonl"),
    }
    serve.run(build_app(AppArgs.model_validate(args)), name="cells", route_prefix="/cells")
    yield CellService(f"{service.url}/cells", folder)
    serve.delete("cells")


def list_schedulers() -> dict[str, int]:
    """The ids of the processes of the cells' schedulers, by the names of their deployments."""
    import ray
    from ray.util.state import list_actors

    actors = list_actors(address=ray.get_runtime_context().gcs_address, detail=True)
    alive = [actor for actor in actors if actor.state == "ALIVE" and actor.class_name.startswith("ServeReplica:cells:")]
    return {actor.class_name.rpartition(":")[2]: actor.pid for actor in alive if actor.pid}


def count_cells(answers: list[dict[str, Any]]) -> Counter[str]:
    """How many requests ran in each cell, by what the ids of its workers begin with."""
    return Counter(worker[:2] for answer in answers for worker in answer["timeline"][-1]["workers"])


def test_both_cells_get_requests_and_give_the_stock_pipelines_image(cells: CellService, tiny_cache: Path) -> None:
    state = cells.health()
    assert (state["status"], state["workers"], state["workers_total"]) == ("ready", 4, 4)
    assert list(state["placement"]) == ["c0n0w0", "c0n0w1", "c1n0w0", "c1n0w1"]
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        asked = [pool.submit(cells.generate, prompt="a red fox", num_inference_steps=40) for _ in range(NUM_REQUESTS)]
        answers = [one.result(timeout=PATIENCE_S) for one in asked]
    assert set(count_cells(answers)) == {"c0", "c1"}
    inputs = make_inputs(64, 64, 40, prompt="a red fox", negative_prompt="", guidance_scale=7.0, seed=7)
    expected = np.stack(stock_result(ensure_tiny("sd3", tiny_cache), inputs, "pil"))[0]
    for answer in answers:
        assert np.array_equal(decode_image(answer["data"][0]["b64_json"]), expected)


def test_an_id_is_joined_and_cancelled_in_its_cell(cells: CellService) -> None:
    with ThreadPoolExecutor(2) as pool:
        body = {"prompt": "mine", "num_inference_steps": STEPS, "request_id": "mine"}
        asked = [pool.submit(cells.generate, **body) for _ in range(2)]
        answers = [one.result(timeout=PATIENCE_S) for one in asked]
    # A moment after its end it is joined too.
    answers.append(cells.generate(**body))
    assert len({json.dumps(answer["timeline"]) for answer in answers}) == 1
    assert http.delete(f"{cells.url}/v1/requests/mine").status_code == 404


def test_a_cell_that_is_killed_loses_no_request(cells: CellService) -> None:
    before = [cells.num_running(cell) for cell in (0, 1)]
    victim = list_schedulers()["Scheduler-1"]
    body = {"prompt": "a lost cell", "num_inference_steps": STEPS}
    with ThreadPoolExecutor(2 * NUM_LONG) as pool:
        asked = [pool.submit(cells.generate, **body) for _ in range(NUM_LONG)]
        streamed = [pool.submit(cells.stream, **body) for _ in range(NUM_LONG)]
        wait_until(lambda: all(cells.num_running(cell) > before[cell] for cell in (0, 1)), "both cells denoise")
        os.kill(victim, signal.SIGKILL)
        answers = [one.result(timeout=PATIENCE_S) for one in asked]
        events = [one.result(timeout=PATIENCE_S) for one in streamed]
    images = {answer["data"][0]["b64_json"] for answer in answers} | {found[-1]["b64_json"] for found in events}
    assert len(images) == 1
    assert sum(answer["retries"] for answer in answers) + sum(found[-1]["retries"] for found in events) > 0
    for found in events:
        steps = [event["step"] for event in found if event["type"] == "image_generation.progress"]
        assert steps[-STEPS:] == list(range(1, STEPS + 1)), "the last attempt is seen from its first step on"
    wait_until(lambda: cells.health()["status"] == "ready", "the cell is back")
    assert list_schedulers()["Scheduler-1"] != victim
