from __future__ import annotations

import base64
import io
import re
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from PIL import Image

from tests.support.waiting import PATIENCE_S
from tests.traces.client.image_service import MODEL, ImageService, running
from traces.client.replay import open_session, replay
from traces.requests import TraceRequest
from traces.results import ReplayResult
from tridentserve.errors import ConfigError, InvalidRequestError, UnknownModelError


@pytest.fixture
def service() -> Iterator[ImageService]:
    with running(ImageService()) as running_service:
        yield running_service


def request(index: int = 0, timestamp_s: float = 0.0) -> TraceRequest:
    return TraceRequest(f"r{index}", timestamp_s, 48, 64, 1, "a fox", "", 4, seed=index)


async def test_the_body_says_what_the_trace_says(service: ImageService) -> None:
    plain = replace(request(), seed=None)
    full = replace(request(1), negative_prompt="blurry", slo_ms=900.0, guidance_scale=3.5, fps=16.0, quality="fast")
    full = replace(full, on_late="degrade", priority=-3)
    results = await replay([plain, full], service.url + "/")
    bodies = {body["request_id"]: body for body in service.bodies}
    common = {
        "model": MODEL,
        "prompt": "a fox",
        "size": "64x48",
        "num_inference_steps": 4,
        "response_format": "b64_json",
    }
    ids = [result.service_request_id for result in results]
    assert bodies[ids[0]] == {**common, "request_id": ids[0]}
    extras = {"negative_prompt": "blurry", "seed": 1, "slo_ms": 900.0, "guidance_scale": 3.5, "quality": "fast"}
    extras |= {"on_late": "degrade", "priority": -3}
    assert bodies[ids[1]] == {**common, **extras, "request_id": ids[1]}
    assert ids[0].endswith("-0-r0")
    again = await replay([plain], service.url)
    assert again[0].service_request_id != ids[0], "the same trace again is not the same requests"


async def test_ids_that_a_service_would_refuse_are_made_safe_and_stay_apart(service: ImageService) -> None:
    requests = [replace(request(), request_id=name) for name in ("a b", "a_b", "\u00e9" * 500)]
    ids = [result.service_request_id for result in await replay(requests, service.url)]
    assert len(set(ids)) == 3
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", name) for name in ids)


async def test_a_slow_service_does_not_delay_later_sends(service: ImageService) -> None:
    service.holds_until = 10
    sent: list[TraceRequest] = []
    done: list[ReplayResult] = []
    # Out of order on purpose, and at twice the speed: due at 0, 0.1, ... 0.9 s.
    requests = [request(index, timestamp_s=0.2 * index) for index in (3, 0, 1, 2, 4, 5, 6, 7, 8, 9)]
    results = await replay(
        requests, service.url, speed=2.0, timeout_s=PATIENCE_S, on_sent=sent.append, on_done=done.append
    )
    assert sorted(body["seed"] for body in service.bodies) == list(range(10))
    assert [result.request for result in results] == requests
    assert sorted(sent, key=lambda sent: sent.timestamp_s) == sent
    assert len(done) == 10
    last_sent_s = max(result.sent_s for result in results)
    for result in results:
        assert result.error is None, "the service waited for all of them before it answered the first"
        assert result.sent_s + result.latency_s > last_sent_s
        assert result.sent_s - result.send_lateness_s == pytest.approx(result.request.timestamp_s / 2)


async def test_failures_of_every_kind_are_results(service: ImageService) -> None:
    service.modes = {0: "error", 1: "disconnect", 2: "wrong-size", 3: "truncated", 4: "not-json", 5: "bad-timeline"}
    results = await replay([request(index) for index in range(7)], service.url)
    errors = [result.error for result in results]
    assert errors[0] == "HTTP 500: out of memory"
    assert errors[1] is not None
    assert errors[1].startswith("RemoteProtocolError")
    assert errors[2] == "the image is 80x48 where 64x48 was asked"
    assert errors[3] is not None
    assert "damaged" in errors[3]
    assert errors[4] == "the answer holds no data[0].b64_json"
    assert errors[5] is not None
    assert errors[5].startswith("the answer's timeline.0.degree is malformed")
    assert errors[6] is None
    assert [result.status for result in results] == [500, None, 200, 200, 200, 200, 200]
    assert results[6].facts.stage_durations["diffuse"] == 0.25
    assert [span.workers for span in results[6].facts.timeline] == [("w0",), ("w1",), ("w3",)]


async def test_a_request_is_given_up_after_the_time_limit(service: ImageService) -> None:
    service.num_answered = 0
    (result,) = await replay([request()], service.url, timeout_s=0.3)
    assert result.error == "no answer within 0.3 s"
    assert result.latency_s >= 0.3


async def test_a_service_that_goes_away_fails_the_rest() -> None:
    with running(ImageService()) as leaving:
        session = await open_session([request()], leaving.url)
        first = await session.send(request(0), session.models[0], 0, 0.0)
        leaving.stop()
        second = await session.send(request(1), session.models[0], 1, 0.0)
    assert first.error is None
    assert second.error is not None
    assert second.error.startswith("Connect")


async def test_deadlines(service: ImageService) -> None:
    service.delay_s, service.slo_s = 0.2, 600.0
    easy, hard, default = replace(request(), slo_ms=600_000.0), replace(request(), slo_ms=100.0), request()
    results = await replay([easy, hard, default], service.url)
    assert [result.slo_s for result in results] == [600.0, 0.1, 600.0]
    # The service says that it met all of them: what the client saw counts.
    assert [result.slo_met for result in results] == [True, False, True]
    failed = replace(results[0], error="gone")
    assert failed.slo_met is False
    assert replace(failed, request=default, facts=type(failed.facts)()).slo_met is None


async def test_refused_and_degraded_requests_are_known_by_the_answers(service: ImageService) -> None:
    service.modes = {1: "refuse", 2: "reduce", 3: "error"}
    degrade = replace(request(2), on_late="degrade", quality="exact")
    results = await replay([request(0), replace(request(1), on_late="refuse"), degrade, request(3)], service.url)
    assert [result.refused for result in results] == [False, True, False, False]
    assert [result.degraded for result in results] == [False, False, True, False]
    assert (results[1].status, results[1].error_code) == (503, "deadline_missed")
    assert results[1].error == "HTTP 503: it is predicted to end 3.50 s after its arrival"
    assert (results[2].facts.reduced_steps, results[2].facts.quality) == (3, "fast")
    assert [result.error_code for result in results] == [None, "deadline_missed", None, "oom"]


async def test_videos_and_image_go_where_their_models_are_served(service: ImageService) -> None:
    service.models, service.modality = [MODEL, "tiny-wan"], {MODEL: "image", "tiny-wan": "video"}
    still, moving = (replace(request(i), model="tiny-wan", num_frames=n, fps=8.0) for i, n in ((1, 1), (2, 9)))
    results = await replay([replace(request(), model=MODEL), still, moving], service.url)
    assert [result.error for result in results] == [None] * 3
    seen = zip(service.bodies, service.paths, strict=True)
    sync = "/v1/videos/sync"
    assert {(body["model"], body.get("num_frames"), path) for body, path in seen} == {
        (MODEL, None, "/v1/images/generations"),
        ("tiny-wan", 1, sync),
        ("tiny-wan", 9, sync),
    }
    body = next(body for body in service.bodies if body.get("num_frames") == 9)
    assert (body["fps"], body["size"], "response_format" in body) == (8.0, "64x48", False)
    assert results[2].facts.stage_durations["diffuse"] == 0.25
    assert [span.stage for span in results[2].facts.timeline] == ["encode", "diffuse", "decode"]


async def test_models_that_start_from_a_image_are_sent_one(service: ImageService) -> None:
    service.models, service.modality = ["edit", "move"], {"edit": "image", "move": "video"}
    service.takes_image = set(service.models)
    edits = [replace(request(index), model="edit", seed=seed) for index, seed in enumerate((1, 1, 2))]
    results = await replay(
        [*edits, replace(request(3), model="move", num_frames=5, width=2048, height=1024)], service.url
    )
    assert [result.error for result in results] == [None] * 4
    assert set(zip((body["model"] for body in service.bodies), service.paths, strict=True)) == {
        ("edit", "/v1/images/edits"),
        ("move", "/v1/videos/sync"),
    }
    images = {(body["model"], body["seed"]): body.get("image") for body in service.bodies}
    assert len({body["image"] for body in service.bodies if body["model"] == "edit"}) == 2
    assert image_size(images["edit", 1]) == (64, 48)
    (moving,) = (body for body in service.bodies if body["model"] == "move")
    assert (image_size(moving["input_reference"]), "image" in moving) == ((1024, 512), False)


def image_size(encoded: str | None) -> tuple[int, int]:
    return Image.open(io.BytesIO(base64.b64decode(encoded or ""))).size


async def test_a_service_that_does_not_say_what_its_models_make(service: ImageService) -> None:
    await replay([request(), replace(request(1), num_frames=5)], service.url)
    assert sorted(service.paths) == ["/v1/images/generations", "/v1/videos/sync"]


async def test_videos_of_a_model_for_image_are_refused_before_anything_is_sent(service: ImageService) -> None:
    service.modality = {MODEL: "image"}
    with pytest.raises(InvalidRequestError, match=f"r1 asks for 17 frames: {MODEL} makes images only"):
        await replay([request(), replace(request(1), num_frames=17)], service.url)
    assert not service.bodies


async def test_models(service: ImageService) -> None:
    service.models = ["tiny-sd3", "tiny-flux"]
    named = replace(request(), model="tiny-flux")
    with pytest.raises(ConfigError, match="several models: choose one of tiny-sd3, tiny-flux"):
        await replay([named, request(1)], service.url)
    with pytest.raises(UnknownModelError, match="does not serve 'sdxl'; it serves tiny-sd3, tiny-flux"):
        await replay([named], service.url, model="sdxl")
    assert [result.model for result in await replay([named], service.url)] == ["tiny-flux"]
    assert [result.model for result in await replay([named], service.url, model="tiny-sd3")] == ["tiny-sd3"]
    service.models = []
    with pytest.raises(ConfigError, match="serves no model"):
        await replay([request()], service.url)


async def test_a_service_that_is_not_healthy_is_reported_at_once(service: ImageService) -> None:
    service.healthy = False
    with pytest.raises(ConfigError, match="/health answers HTTP 503"):
        await replay([request()], service.url)
    with socket.socket() as bound:  # Nothing listens there, and nobody else is given the port meanwhile.
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(ConfigError, match=f"nothing listens at http://127.0.0.1:{port}"):
            await replay([request()], f"http://127.0.0.1:{port}")
    for url in ("127.0.0.1:8000", "ftp://127.0.0.1", "http://"):
        with pytest.raises(ConfigError):
            await replay([request()], url)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
async def test_speed_must_be_a_positive_number(speed: float) -> None:
    with pytest.raises(ConfigError, match="speed"):
        await replay([request()], "http://127.0.0.1:9", speed=speed)
