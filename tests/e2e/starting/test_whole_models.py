"""A service of pipelines that are no family: their results are the stock pipelines', with progress, and can be
cancelled."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from profiler.tables.rows import ProfileTable, read_shipped_table, write_table
from tests.e2e.conftest import Service, decode_image
from tests.e2e.test_faults import running
from tests.pipelines.whole_models import make_stock_pixels, whole_folder
from tests.support import http
from tests.support.waiting import PATIENCE_S, wait_until
from tridentserve.models.model_folder import stage_weights_bytes
from tridentserve.requests import GenerationInputs, Shape

pytestmark = pytest.mark.slow  # a service of its own

# The models, with those whose times they have.
IMAGES, VIDEOS = "stable_diffusion", "ltx"
TIMES_OF = {IMAGES: ("tiny-cpu", "tiny-sd3"), VIDEOS: ("tiny-video-cpu", "tiny-wan")}
LONG_STEPS = 900


@pytest.fixture(scope="module")
def whole(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    from ray import serve

    from deployments.app import build_app
    from deployments.config.app import AppArgs

    scratch = tmp_path_factory.mktemp("whole")
    args = make_args(scratch)
    serve.run(build_app(AppArgs.model_validate(args)), name="whole", route_prefix="/whole")
    yield replace(service, url=f"{service.url}/whole", decision_log=scratch / "decisions.jsonl", args=args)
    serve.delete("whole")


def make_args(scratch: Path) -> dict[str, Any]:
    """The configuration of the service."""
    folders = {name: whole_folder(name, scratch) for name in TIMES_OF}
    limits = {"max_side": 128, "max_frames": 9, "max_pixel_frames": 128 * 128 * 9, "max_steps": LONG_STEPS}
    return {
        "models": [{"name": name, "path": str(folder), "limits": limits} for name, folder in folders.items()],
        "profiles": [str(write_times(name, folder, scratch)) for name, folder in folders.items()],
        "cluster": {"workers_per_node": 2, "memory_mb": 256, "cpus_per_worker": 0.1},
        "handoff": {"capacity_mb": 1},
        "videos": {"data_dir": str(scratch / "videos")},
        "expected_load": [{"model": name, "width": 64, "height": 64, "num_inference_steps": 4} for name in folders],
        "replicas": {"host_dir": str(scratch / "host")},
        "cache_dir": str(scratch),
        "decision_log": str(scratch / "decisions.jsonl"),
    }


def write_times(name: str, folder: Path, scratch: Path) -> Path:
    """A profile table with the times of a tiny model of a family and the weights of this one."""
    table, tiny = TIMES_OF[name]
    known, held, path = read_shipped_table(table), stage_weights_bytes(folder), scratch / f"{name}.csv"
    rows = tuple(replace(row, model=name) for row in known.rows if row.model == tiny and row.degree == 1)
    weights = (replace(row, model=name, weights_bytes=held[row.stage]) for row in known.weights if row.model == tiny)
    write_table(path, ProfileTable(name, rows, tuple(weights)))
    return path


def make_inputs(shape: Shape, steps: int = 4, **changes: Any) -> GenerationInputs:
    given: dict[str, Any] = {"prompt": "a red circle", "guidance_scale": 4.0, "seed": 3, "negative_prompt": "fog"}
    return GenerationInputs(shape=shape, num_inference_steps=steps, **(given | changes))


def test_images_are_those_of_the_stock_pipeline(whole: Service) -> None:
    inputs = make_inputs(Shape(64, 96), num_outputs=2)
    answer = whole.generate(
        model=IMAGES, prompt=inputs.prompt, negative_prompt="fog", size="96x64", n=2, seed=3, num_inference_steps=4,
        guidance_scale=4.0,
    )  # fmt: skip
    images = [decode_image(each["b64_json"]) for each in answer["data"]]
    expected = make_stock_pixels(Path(whole.args["models"][0]["path"]), inputs, num_images_per_prompt=2)
    assert np.array_equal(np.stack(images), expected)
    spans = answer["timeline"]
    assert {span["stage"]: span.get("steps") for span in spans}["diffuse"] == 4


def test_a_stream_tells_of_each_step(whole: Service) -> None:
    body = {"model": IMAGES, "prompt": "a", "size": "64x64", "num_inference_steps": 6, "stream": True}
    answer = http.post(f"{whole.url}/v1/images/generations", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.text.count("event: image_generation.progress") >= 4, answer.text[:2000]


def test_what_a_model_lacks_is_told(whole: Service) -> None:
    told = {model["id"]: model for model in http.get(f"{whole.url}/v1/models").json()["data"]}
    assert told[IMAGES]["pipeline"] == "StableDiffusionPipeline"
    assert "batches" in told[VIDEOS]["lacks"]
    assert told[VIDEOS]["output_modality"] == "video"


def test_a_cancelled_request_stops_and_the_next_is_served(whole: Service) -> None:
    body = {"model": IMAGES, "prompt": "long", "size": "64x64", "num_inference_steps": LONG_STEPS, "request_id": "long"}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, f"{whole.url}/v1/images/generations", json=body)
        wait_until(lambda: running(whole, "long"), "the request runs")
        assert http.delete(f"{whole.url}/v1/requests/long").status_code == 200
        assert waiting.result(timeout=PATIENCE_S).status_code == 499
    wait_until(
        lambda: any(decision["event"]["kind"] == "plan_stopped" for decision in whole.decisions()), "its plan stopped"
    )
    whole.generate(model=IMAGES, prompt="a", size="64x64", num_inference_steps=2)


def test_videos_are_those_of_the_stock_pipeline(whole: Service) -> None:
    body = {"model": VIDEOS, "prompt": "a red circle", "negative_prompt": "fog", "size": "64x64", "num_frames": 9}
    body |= {"num_inference_steps": 3, "guidance_scale": 4.0, "seed": 3}
    job = http.post(f"{whole.url}/v1/videos", json=body).json()

    def ended() -> bool:
        job.update(http.get(f"{whole.url}/v1/videos/{job['id']}").json())
        return job["status"] in ("completed", "failed")

    wait_until(ended, "the video is made")
    assert job["status"] == "completed", job
    content = http.get(f"{whole.url}/v1/videos/{job['id']}/content").content
    with av.open(io.BytesIO(content), "r") as video:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])
    inputs = make_inputs(Shape(64, 64, 9), 3)
    (expected,) = make_stock_pixels(Path(whole.args["models"][1]["path"]), inputs, num_frames=9)
    assert frames.shape == expected.shape
    likeness = np.corrcoef(frames.ravel(), expected.ravel())[0, 1]
    assert likeness > 0.4, "the same but for the codec, which such noise is hard for"


def test_a_request_that_the_pipeline_cannot_serve_is_refused(whole: Service) -> None:
    body = {"model": IMAGES, "prompt": "a", "size": "60x64", "num_inference_steps": 2}
    assert http.post(f"{whole.url}/v1/images/generations", json=body).status_code == 422
    body |= {"size": "64x64", "lora": "x"}
    assert http.post(f"{whole.url}/v1/images/generations", json=body).status_code == 422
