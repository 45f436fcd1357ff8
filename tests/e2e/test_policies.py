"""A step-level policy live: requests move between worker sets at step boundaries, and their images do not change."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deployments.assembly.replay import replay_log
from deployments.config.app import AppArgs
from tests.e2e.conftest import Service, decode_image
from tests.support.decision_log import read_log
from tests.support.waiting import PATIENCE_S, wait_until
from tridentserve.pipelines.tiny.build import ensure_tiny

pytestmark = pytest.mark.slow  # a service of its own: a minute
SIDE, LONG, SHORT = 512, 40, 12


@pytest.fixture(scope="module")
def tetriserve(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Four workers with all of tiny-sd3 each, beside the other service."""
    from ray import serve

    from deployments.app import build_app

    log = tmp_path_factory.mktemp("tetriserve") / "decisions.jsonl"
    args = {
        "models": [{"name": "tiny-sd3", "tiny": "sd3", "limits": {"max_side": SIDE}}],
        "cluster": {"workers_per_node": 4, "memory_mb": 512, "cpus_per_worker": 0.1},
        "expected_load": [{"model": "tiny-sd3", "width": SIDE, "height": SIDE, "num_inference_steps": LONG}],
        "dispatch": {"policy": "tetriserve"},
        "cache_dir": service.args["cache_dir"],
        "decision_log": str(log),
    }
    serve.run(build_app(AppArgs.model_validate(args)), name="tetriserve", route_prefix="/tetriserve")
    yield replace(service, url=f"{service.url}/tetriserve", decision_log=log, args=args)
    serve.delete("tetriserve")


def body(index: int, steps: int) -> dict[str, Any]:
    return {"prompt": f"number {index}", "size": f"{SIDE}x{SIDE}", "num_inference_steps": steps, "seed": index}


def stock_image(cache: str, index: int, steps: int) -> np.ndarray[Any, Any]:
    import diffusers

    torch.set_num_threads(1)
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(
        ensure_tiny("sd3", Path(cache)), local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(index)
    result = pipeline(
        prompt=f"number {index}",
        width=SIDE,
        height=SIDE,
        num_inference_steps=steps,
        guidance_scale=5.0,
        generator=generator,
    )
    return np.asarray(result.images[0])


def test_a_request_changes_workers_at_step_boundaries_and_its_image_stays(tetriserve: Service) -> None:
    """One request alone is spread over several workers; four more leave it one, or none for a while."""
    before = len(tetriserve.decisions())

    def segments() -> int:
        effects = (effect for decision in tetriserve.decisions()[before:] for effect in decision["effects"])
        return sum(effect["kind"] == "run" and "diffuse" in effect["plan"]["stages"] for effect in effects)

    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(tetriserve.generate, **body(0, LONG), guidance_scale=5.0, slo_ms=600_000)
        wait_until(lambda: segments() >= 2, "one of its segments has run", every_s=0.02)
        others = [
            pool.submit(tetriserve.generate, **body(i, SHORT), guidance_scale=5.0, slo_ms=600_000) for i in range(1, 5)
        ]
        answers = [one.result(timeout=PATIENCE_S) for one in (first, *others)]
    diffuse = [[run for run in answer["timeline"] if run["stage"] == "diffuse"] for answer in answers]
    assert len({tuple(run["workers"]) for run in diffuse[0]}) >= 2
    assert [sum(run["steps"] for run in runs) for runs in diffuse] == [LONG, *[SHORT] * 4]
    for index, (answer, runs) in enumerate(zip(answers, diffuse, strict=True)):
        expected = stock_image(tetriserve.args["cache_dir"], index, LONG if index == 0 else SHORT)
        difference = np.abs(decode_image(answer["data"][0]["b64_json"]).astype(int) - expected.astype(int)).max()
        assert difference <= (0 if all(run["degree"] == 1 for run in runs) else 1)


def test_the_log_of_a_policy_replays_to_the_same_effects(tetriserve: Service) -> None:
    tetriserve.generate(**body(9, SHORT))
    decisions = read_log(tetriserve.decision_log)
    for decision, effects in replay_log(AppArgs.model_validate(tetriserve.args), decisions):
        assert decision.effects == effects
