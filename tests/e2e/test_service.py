"""A prompt becomes an image, over HTTP, through a handle and from a trace; bad input gets no further than the API."""

from __future__ import annotations

import base64
import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from deployments.assembly.replay import replay_log
from deployments.config.app import AppArgs
from deployments.serve.ingress import list_ingress_settings
from tests.e2e.conftest import Service, decode_image
from tests.support import http
from tests.support.decision_log import read_lines, read_log
from tests.support.processes import run
from tests.support.waiting import PATIENCE_S
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.scheduling.events import RequestArrived

ROOT = Path(__file__).parent.parent.parent


def test_ready(service: Service) -> None:
    health = http.get(f"{service.url}/health").json()
    assert (health["status"], health["workers"]) == ("ready", 4)
    assert health["placement"]["n0w3"] == "tiny-flux:C+tiny-wan:EDC"


def test_connections_go_through_haproxy(service: Service) -> None:
    import ray
    from ray.util.state import list_actors

    assert http.get(f"{service.url}/-/routes").json() == {"/": "tridentserve"}
    if list_ingress_settings():
        actors = list_actors(address=ray.get_runtime_context().gcs_address)
        assert "HAProxyManager" in {actor.class_name for actor in actors if actor.state == "ALIVE"}


def test_files_of_any_format_show_the_same_image(service: Service) -> None:
    body = {"model": "tiny-sd3", "prompt": "a red fox", "size": "64x64", "num_inference_steps": 4, "seed": 11}
    exact = decode_image(service.generate(**body)["data"][0]["b64_json"]).astype(int)
    smallest = service.generate(**body, output_format="jpeg", output_compression=5)["data"][0]["b64_json"]
    for name in ("jpeg", "webp"):
        found = service.generate(**body, output_format=name, style="vivid")
        assert (found["output_format"], found["ignored"]) == (name, ["style"])
        (entry,) = found["data"]
        assert Image.open(io.BytesIO(base64.b64decode(entry["b64_json"]))).format == name.upper()
        assert np.abs(decode_image(entry["b64_json"]) - exact).mean() < 20
        assert len(smallest) < len(entry["b64_json"])


@pytest.mark.parametrize("model", ["tiny-flux", "tiny-sd3"])
def test_the_image_is_the_stock_pipelines(service: Service, tiny_cache: Path, model: str) -> None:
    import diffusers

    answer = service.generate(
        model=model, prompt="a red fox", size="160x96", num_inference_steps=5, seed=11, guidance_scale=4.0, n=2
    )
    torch.set_num_threads(1)
    family = model.removeprefix("tiny-")
    kind = {"flux": diffusers.FluxPipeline, "sd3": diffusers.StableDiffusion3Pipeline}[family]
    pipeline = kind.from_pretrained(ensure_tiny(family, tiny_cache), local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        prompt="a red fox",
        width=160,
        height=96,
        num_inference_steps=5,
        guidance_scale=4.0,
        num_images_per_prompt=2,
        generator=torch.Generator("cpu").manual_seed(11),
    ).images
    exact = all(run["degree"] == 1 for run in answer["timeline"])
    for got, stock in zip(answer["data"], expected, strict=True):
        difference = np.abs(decode_image(got["b64_json"]).astype(int) - np.asarray(stock).astype(int)).max()
        assert difference <= (0 if exact else 1)
    assert set(answer["stage_durations"]) == {"encode", "diffuse", "decode"}


def test_a_request_that_would_be_late_is_made_with_less_work(service: Service) -> None:
    """At 60 % of the predicted time a lower quality, and fewer steps too where that is not enough."""
    body = {"model": "tiny-sd3", "prompt": "in a hurry", "size": "256x256", "num_inference_steps": 40, "seed": 5}
    for _ in range(5):  # what is predicted when it arrives may be something else
        quote = http.post(f"{service.url}/v1/quotes", json=body).json()["data"][0]
        answer = service.generate(**body, on_late="degrade", slo_ms=600 * quote["predicted_s"])
        if answer["quality"] != "exact":
            break
    steps = answer["reduced_steps"] or 40
    assert answer["quality"] == "fast"
    assert 20 <= steps <= 40
    assert sum(run["steps"] or 0 for run in answer["timeline"]) == steps
    plain = service.generate(**{**body, "num_inference_steps": steps, "quality": "fast"})
    assert (plain["reduced_steps"], plain["quality"]) == (None, "fast")
    assert plain["skipped_steps"] == answer["skipped_steps"]
    image, same = (decode_image(each["data"][0]["b64_json"]).astype(int) for each in (answer, plain))
    assert np.abs(image - same).max() <= 1


def test_a_fast_request_skips_steps_wherever_it_runs(service: Service) -> None:
    body = {"model": "tiny-sd3", "prompt": "a still life", "size": "256x256", "num_inference_steps": 40, "seed": 6}
    exact = service.generate(**body)
    assert (exact["quality"], exact["skipped_steps"]) == ("exact", 0)
    assert "ignored" not in exact
    fast = [service.generate(**body, quality=quality) for quality in ("fast", "low")]
    assert fast[0]["skipped_steps"] == fast[1]["skipped_steps"] > 0
    first, second = (decode_image(each["data"][0]["b64_json"]).astype(int) for each in fast)
    assert np.abs(first - second).max() <= 1


def test_stages_run_where_the_placement_says(service: Service) -> None:
    answer = service.generate(model="tiny-flux", prompt="apart", size="64x64", num_inference_steps=3)
    ran = {run["stage"]: set(run["workers"]) for run in answer["timeline"]}
    assert (ran["encode"], ran["decode"]) == ({"n0w0"}, {"n0w3"})
    assert ran["diffuse"] <= {"n0w1", "n0w2"}


def test_many_at_once(service: Service) -> None:
    def one(index: int) -> dict[str, Any]:
        model = ("tiny-flux", "tiny-sd3")[index % 2]
        return service.generate(model=model, prompt=f"number {index}", size="64x64", num_inference_steps=4, seed=index)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(one, range(12)))
    assert len({answer["request_id"] for answer in answers}) == 12
    again = one(3)
    assert np.array_equal(decode_image(again["data"][0]["b64_json"]), decode_image(answers[3]["data"][0]["b64_json"]))


def stream_events(service: Service, **body: Any) -> list[dict[str, Any]]:
    """The data of all events of a stream."""
    with http.stream("POST", f"{service.url}/v1/images/generations", json={**body, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_previews_are_streamed_and_change_no_pixel(service: Service) -> None:
    body = {"model": "tiny-flux", "prompt": "a red fox", "size": "128x96", "num_inference_steps": 8, "seed": 3}
    exact = decode_image(service.generate(**body)["data"][0]["b64_json"])
    previews: list[dict[str, Any]] = []
    # There are none before the worker that denoises has fitted the colours of the model, for which no request waits.
    while len(previews) < 3:
        events = stream_events(service, **body, partial_images=3)
        assert np.array_equal(decode_image(events[-1]["b64_json"]), exact)
        previews = [event for event in events if event["type"] == "image_generation.partial_image"]
    assert [(event["partial_image_index"], event["step"]) for event in previews] == [(0, 2), (1, 4), (2, 6)]
    assert all(decode_image(event["b64_json"]).shape == (12, 16, 3) for event in previews)


def test_progress_is_streamed(service: Service) -> None:
    events = stream_events(service, model="tiny-flux", prompt="x", size="64x64", num_inference_steps=6)
    steps = [event["step"] for event in events if event["type"] == "image_generation.progress"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert decode_image(events[-1]["b64_json"]).shape == (64, 64, 3)


def test_another_ray_app_gets_an_image_through_the_handle(service: Service) -> None:
    from ray import serve

    @serve.deployment(ray_actor_options={"num_cpus": 0.1})
    class Caller:
        async def ask(self) -> tuple[bytes, list[str]]:
            body = {"model": "tiny-sd3", "prompt": "from afar", "size": "80x64", "num_inference_steps": 3}
            handle: Any = serve.get_app_handle("tridentserve")
            result = await handle.generate.remote(body)
            kinds = [u["type"] async for u in handle.options(stream=True).generate_stream.remote(body)]
            return result["images"][0], kinds

    caller: Any = serve.run(Caller.bind(), name="caller", route_prefix=None)  # type: ignore[attr-defined]
    try:
        png, kinds = caller.ask.remote().result(timeout_s=PATIENCE_S)
    finally:
        serve.delete("caller")
    assert Image.open(io.BytesIO(png)).size == (80, 64)
    assert (kinds[0], kinds[-1]) == ("queued", "completed")
    assert kinds.count("progress") == 3


def test_the_handle_refuses_what_http_refuses(service: Service) -> None:
    from ray import serve

    handle: Any = serve.get_app_handle("tridentserve")
    with pytest.raises(ValueError, match=r"invalid_request: .* multiples of 16"):
        handle.generate.remote({"prompt": "x", "size": "65x64"}).result(timeout_s=PATIENCE_S)


def test_bad_input_is_refused_before_the_scheduler_hears_of_it(service: Service) -> None:
    before = service.num_arrived()
    url = f"{service.url}/v1/images/generations"
    for body in (
        {"prompt": "x", "size": "65x64"},
        {"prompt": "x", "size": "4096x4096"},
        {"prompt": " "},
        {"prompt": "x", "model": "nope"},
        {"prompt": "x", "colour": "red"},
        {"prompt": "x\0"},
    ):
        answer = http.post(url, json=body)
        assert answer.status_code == (404 if body.get("model") == "nope" else 422)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    nan = http.post(url, content='{"prompt": "x", "guidance_scale": NaN}', headers={"content-type": "application/json"})
    assert nan.status_code == 422
    assert http.post(url, json={"prompt": "x" * (1 << 20)}).status_code == 413
    assert service.num_arrived() == before


def test_a_trace_is_replayed(service: Service, tmp_path: Path) -> None:
    lines = [
        f"Request(request_id={i}, timestamp={i * 0.25}, height={size}, width={size}, num_frames=1, prompt='a city', "
        f"negative_prompt='blurry', num_inference_steps=6)"
        for i, size in enumerate([64, 128, 64, 256, 64, 128, 64, 64])
    ]
    trace = tmp_path / "trace.txt"
    trace.write_text("\n".join(lines))
    command = [
        sys.executable,
        "scripts/replay_trace.py",
        str(trace),
        "--url",
        service.url,
        "--out",
        str(tmp_path / "out"),
    ]
    done = run([*command, "--model", "tiny-flux"], ROOT)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["completed_requests"], summary["failed_requests"]) == (8, 0)
    spans = [e for e in json.loads((tmp_path / "out/trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {"encode", "diffuse", "decode"} <= {event["args"]["stage"] for event in spans}
    assert len({event["tid"] for event in spans}) >= 3


def test_the_decision_log_replays_to_the_same_effects(service: Service) -> None:
    for model in ("tiny-flux", "tiny-sd3"):
        service.generate(model=model, prompt="to be replayed", size="64x64", num_inference_steps=4, n=2)
    args = AppArgs.model_validate(service.args)
    decisions = read_log(service.decision_log)
    replayed = list(replay_log(args, decisions))
    assert sum(isinstance(decision.event, RequestArrived) for decision, _ in replayed) >= 2
    for decision, effects in replayed:
        assert decision.effects == effects


def test_a_late_request_is_explained_by_the_service_and_from_its_log(service: Service, tmp_path: Path) -> None:
    """The scheduler's process has it in memory; the log is run again in another one."""
    body = {"model": "tiny-sd3", "prompt": "too late", "size": "64x64", "num_inference_steps": 4}
    service.generate(**body, request_id="explained", slo_ms=1)
    answer = http.get(f"{service.url}/v1/requests/explained/explain", timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["text"].startswith("explained (tiny-sd3, 64x64, 4 steps) was ")
    assert told["late_s"] > 0
    assert "own time" in [cause["kind"] for cause in told["causes"]]
    assert http.get(f"{service.url}/v1/requests/never-made/explain").status_code == 404

    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"applications": [{"args": service.args}]}))
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(read_lines(service.decision_log)) + "\n")
    command = [sys.executable, "scripts/explain.py", str(log), "explained", "--config", str(config), "--json"]
    done = run([*command, "--limit-s", str(PATIENCE_S)], ROOT)
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["text"].splitlines()[0] == told["text"].splitlines()[0]
    assert [cause["verified"] for cause in again["causes"] if cause["kind"] == "own time"] == [True]


def test_an_incident_is_replayed_from_the_command_line(service: Service, tmp_path: Path) -> None:
    service.generate(model="tiny-flux", prompt="an incident", size="64x64", num_inference_steps=2)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"applications": [{"args": service.args}]}))
    lines = read_lines(service.decision_log)
    log = tmp_path / "log.jsonl"

    def replay(lines: list[str], end: str = "\n") -> CompletedProcess[str]:
        log.write_text("\n".join(lines) + end)
        command = [sys.executable, "scripts/replay_decisions.py", str(log), "--config", str(config)]
        return run(command, ROOT)

    same = replay(lines)
    assert (same.returncode, same.stdout.strip()) == (0, f"{len(lines)} decisions, 0 differ")
    number = next(i for i, line in enumerate(lines) if '"kind":"run"' in line and "n0w0" in line)
    other = replay([*lines[:number], lines[number].replace("n0w0", "n0w3", 1)])
    assert other.returncode == 1
    assert f"line {number + 1}" in other.stdout
    cut_off = replay([*lines, lines[0][:100]], end="")
    assert (cut_off.returncode, cut_off.stdout) == (0, same.stdout)
    assert "the last line is incomplete" in cut_off.stderr
    broken = replay([*lines[:3], "{}"])
    assert broken.returncode == 2
    assert "log.jsonl:4" in broken.stderr
