"""Videos of the running service: the stock pipeline's frames, as jobs and at once, and what stops them."""

from __future__ import annotations

import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from tests.e2e.conftest import Service
from tests.e2e.test_faults import running, wait_for_stop
from tests.support import http
from tests.support.waiting import PATIENCE_S, wait_until
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.requests import GenerationInputs, Shape

BODY = {"prompt": "a red fox", "size": "64x64", "num_frames": 5, "num_inference_steps": 3, "fps": 8, "seed": 11}


def frames_of(content: bytes) -> list[Any]:
    with av.open(io.BytesIO(content), "r") as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def until_ended(service: Service, video_id: str) -> dict[str, Any]:
    deadline_s = time.monotonic() + PATIENCE_S
    while (job := http.get(f"{service.url}/v1/videos/{video_id}").json())["status"] not in ("completed", "failed"):
        assert time.monotonic() < deadline_s, job
        time.sleep(0.1)
    return dict(job)


def submit(service: Service, **fields: Any) -> dict[str, Any]:
    answer = http.post(f"{service.url}/v1/videos", data={name: str(v) for name, v in {**BODY, **fields}.items()})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_the_frames_are_the_stock_pipelines_and_the_file_shows_them(service: Service, tiny_cache: Path) -> None:
    from ray import serve

    from tests.pipelines.models import stock_result

    handle: Any = serve.get_app_handle("tridentserve")
    body = {**BODY, "model": "tiny-wan"}
    result = handle.generate.remote({**body, "output_format": "frames"}).result(timeout_s=PATIENCE_S)
    torch.set_num_threads(1)
    inputs = GenerationInputs("a red fox", Shape(64, 64, 5), 3, 5.0, 11)
    expected = stock_result(ensure_tiny("wan", tiny_cache), inputs, "np")
    (frames,) = result["frames"]
    assert np.array_equal(frames, (expected[0] * 255).round().astype("uint8"))
    answer = http.post(f"{service.url}/v1/videos/sync", json=body)
    shown = frames_of(answer.content)
    assert len(shown) == 5
    # H.264 loses no more than this, though the frames are noise.
    assert np.abs(np.stack(shown).astype(int) - frames).mean() < 12


def test_a_job_over_http(service: Service) -> None:
    job = submit(service, request_id="over-http")
    assert (job["id"], job["status"], job["seconds"]) == ("over-http", "queued", "0.625")
    done = until_ended(service, "over-http")
    assert (done["status"], done["progress"]) == ("completed", 100), done
    assert set(done["stage_durations"]) == {"encode", "diffuse", "decode"}
    assert {worker for run in done["timeline"] for worker in run["workers"]} == {"n0w3"}
    assert done["peak_memory_mb"] > 0
    explained = http.get(f"{service.url}/v1/requests/over-http/explain").json()
    assert (explained["request_id"], explained["model"]) == ("over-http", done["model"]), explained
    content = http.get(done["url"])
    assert (content.status_code, content.headers["content-type"]) == (200, "video/mp4")
    assert [frame.shape for frame in frames_of(content.content)] == [(64, 64, 3)] * 5
    assert http.delete(f"{service.url}/v1/videos/over-http").json()["deleted"]
    assert http.get(f"{service.url}/v1/videos/over-http").status_code == 404
    submit(service, request_id="over-http", prompt="a grey wolf")  # the engine still keeps the result of the first
    done = until_ended(service, "over-http")
    assert (done["status"], done["prompt"]) == ("completed", "a grey wolf"), done


def test_delete_stops_a_job_within_a_step(service: Service) -> None:
    submit(service, request_id="long-video", num_inference_steps=900)
    wait_until(lambda: running(service, "long-video"), "the job runs")
    assert http.delete(f"{service.url}/v1/videos/long-video").status_code == 200
    wait_for_stop(service, "long-video")
    job = http.get(f"{service.url}/v1/videos/long-video").json()
    assert (job["status"], job["error"]["code"]) == ("failed", "cancelled")
    assert 0 < job["progress"] < 100 or job["progress"] == 0


def test_images_and_videos_have_routes_of_their_own(service: Service) -> None:
    answer = http.post(f"{service.url}/v1/videos", json={**BODY, "model": "tiny-sd3"})
    assert (answer.status_code, "/v1/images/generations" in answer.text) == (404, True)
    answer = http.post(f"{service.url}/v1/images/generations", json={"prompt": "a fox", "model": "tiny-wan"})
    assert (answer.status_code, "/v1/videos" in answer.text) == (404, True)


@pytest.mark.slow
def test_jobs_outlive_the_process_that_keeps_them(service: Service) -> None:
    """SIGKILL the replica of Videos while it has jobs: the next one ends all of them."""
    ids = [f"kept-{index}" for index in range(6)]
    for video_id in ids:
        submit(service, request_id=video_id, num_inference_steps=40)
    until_ended(service, ids[0])
    before = videos_pid()
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: videos_pid() not in (0, before), "there is another replica")
    wait_until(lambda: http.get(f"{service.url}/v1/videos/{ids[0]}").status_code == 200, "it answers")
    assert [until_ended(service, video_id)["status"] for video_id in ids] == ["completed"] * 6


def videos_pid() -> int:
    """The process id of the replica of Videos; 0 while there is none."""
    import ray
    from ray.util.state import list_actors

    alive = [("state", "=", "ALIVE"), ("class_name", "=", "ServeReplica:tridentserve:Videos")]
    actors = list_actors(ray.get_runtime_context().gcs_address, filters=alive)  # type: ignore[arg-type]
    return (actors[0].pid or 0) if actors else 0
