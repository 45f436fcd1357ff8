"""The HTTP routes over a fake backend: answers, streams, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import base64
import logging
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from tests.deployments.clients import IMAGES, get_error, open_client, parse_events
from tests.deployments.fake_backend import FakeBackend
from tridentserve.engine.live.updates import FailedUpdate
from tridentserve.errors import OverloadedError, RequestCancelledError, WorkerError

CANARY = "canary-7f3a"
BODY = {"prompt": "a cat", "size": "64x32", "num_inference_steps": 2, "request_id": "r1", "seed": 7}
JSON = {"Content-Type": "application/json"}


async def test_an_answer() -> None:
    backend = FakeBackend()
    async with open_client(backend) as http:
        answer = await http.post(IMAGES, json={**BODY, "n": 2, "slo_ms": 1000})
    assert answer.status_code == 200
    content = answer.json()
    assert len(content["data"]) == 2
    for entry in content["data"]:
        assert Image.open(BytesIO(base64.b64decode(entry["b64_json"]))).size == (64, 32)
    assert content["created"] == 1_800_000_000
    assert content["usage"] == {"peak_memory_mb": 12.5}
    assert content["size"] == "64x32"
    told = {key: content[key] for key in ("request_id", "model", "seed", "slo_s", "slo_met", "peak_memory_mb")}
    assert told == {
        "request_id": "r1",
        "model": "tiny-sd3",
        "seed": 7,
        "slo_s": 1.0,
        "slo_met": True,
        "peak_memory_mb": 12.5,
    }
    assert content["stage_durations"] == {"encode": 0.1, "diffuse": 0.3, "decode": 0.1}
    assert content["timeline"][0]["workers"] == ["n0w0"]
    assert "images" not in content
    assert backend.ended == {"r1": "completed"}


async def test_a_stream() -> None:
    async with open_client(FakeBackend()) as http:
        answer = await http.post(IMAGES, json={**BODY, "n": 2, "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = parse_events(answer.text)
    assert [name for name, _ in found] == [
        "image_generation.queued",
        "image_generation.progress",
        "image_generation.progress",
        "image_generation.completed",
        "image_generation.completed",
    ]
    assert all(data["type"] == name for name, data in found)
    progress = {"type": "image_generation.progress", "request_id": "r1", "step": 1, "num_steps": 2}
    assert found[1][1] == {**progress, "queue_position": None, "eta_s": None}
    assert [data["index"] for _, data in found[3:]] == [0, 1]
    assert Image.open(BytesIO(base64.b64decode(found[4][1]["b64_json"]))).size == (64, 32)
    assert found[4][1]["seed"] == 7


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (OverloadedError("the queue is full"), 429, "rate_limit_error", "1"),
        (WorkerError("no worker is left"), 503, "server_error", "1"),
        (ValueError("traceback " + CANARY), 500, "server_error", None),
    ],
)
async def test_a_refused_request_has_its_status(
    error: Exception, status: int, kind: str, retry_after: str | None, stream: bool
) -> None:
    async with open_client(FakeBackend(refuse=error)) as http:
        answer = await http.post(IMAGES, json={**BODY, "stream": stream})
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == retry_after
    assert get_error(answer)["type"] == kind
    assert "traceback" not in answer.text.lower()


@pytest.mark.parametrize(
    ("fail", "status", "code"),
    [
        (RequestCancelledError("deleted"), 499, "cancelled"),
        (KeyError(CANARY), 500, "internal_error"),
        (FailedUpdate("r1", "worker_failed", "lost"), 503, "worker_failed"),
        (FailedUpdate("r1", "invalid_request", "bad", "size"), 422, "invalid_request"),
        (FailedUpdate("r1", "no_such_code", "odd"), 500, "internal_error"),
    ],
)
async def test_a_request_that_fails_halfway(fail: Any, status: int, code: str) -> None:
    backend = FakeBackend(fail=fail)
    async with open_client(backend) as http:
        answer = await http.post(IMAGES, json=BODY)
        streamed = await http.post(IMAGES, json={**BODY, "stream": True})
    assert (answer.status_code, get_error(answer)["code"]) == (status, code)
    assert streamed.status_code == 200
    name, data = parse_events(streamed.text)[-1]
    assert name == data["type"] == "error"
    assert data["error"] == get_error(answer)
    assert CANARY not in answer.text + streamed.text
    assert not backend.running


async def test_updates_that_stop_short_are_an_error() -> None:
    async with open_client(FakeBackend(stop_after=1)) as http:
        answer = await http.post(IMAGES, json=BODY)
        streamed = await http.post(IMAGES, json={**BODY, "stream": True})
    assert answer.status_code == 500
    assert parse_events(streamed.text)[-1][0] == "error"


async def test_validation_names_the_field_and_repeats_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    backend = FakeBackend()
    async with open_client(backend) as http:
        for change in (
            {"steps": CANARY},
            {"seed": CANARY},
            {"size": CANARY},
            {"model": CANARY},
            {"prompt": f"{CANARY}\0"},
        ):
            answer = await http.post(IMAGES, json={"prompt": CANARY, **change})
            assert answer.status_code == (404 if "model" in change else 422)
            assert get_error(answer)["param"] == next(iter(change))
            assert get_error(answer)["type"] == "invalid_request_error"
            assert CANARY not in answer.text
        await http.post(IMAGES, json={**BODY, "prompt": CANARY})
    assert len(backend.seen) == 1
    assert CANARY not in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("GET", "/redoc", 404, "not_found"),
        ("GET", "/v1/models/", 404, "not_found"),
        ("POST", "/v1/images/../images/generationsx", 404, "not_found"),
        ("GET", IMAGES, 405, "method_not_allowed"),
        ("PUT", IMAGES, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/requests/r1", 405, "method_not_allowed"),
    ],
)
async def test_routes_that_are_not_there(method: str, path: str, status: int, code: str) -> None:
    async with open_client(FakeBackend()) as http:
        answer = await http.request(method, path)
    assert answer.status_code == status
    assert get_error(answer)["code"] == code
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize("request_id", ["unknown", "a" * 129, "%00", "%2e%2e%2fx", ".x", "%ff", "é"])
async def test_delete_of_an_unknown_request(request_id: str) -> None:
    async with open_client(FakeBackend()) as http:
        answer = await http.delete(f"/v1/requests/{request_id}")
    assert answer.status_code == 404
    assert get_error(answer)["code"] in ("request_not_found", "not_found")


async def test_models() -> None:
    async with open_client(FakeBackend()) as http:
        content = (await http.get("/v1/models")).json()
    assert content["object"] == "list"
    first, second = content["data"]
    assert (first["id"], first["object"], first["family"]) == ("tiny-sd3", "model", "sd3")
    assert isinstance(first["created"], int)
    assert first["limits"] == {
        "min_side": 32,
        "max_side": 256,
        "max_pixels": 192 * 256,
        "max_steps": 50,
        "max_outputs": 3,
        "max_prompt_chars": 200,
        "size_multiple": 16,
    }
    assert first["defaults"] == {"size": "208x208", "num_inference_steps": 28, "guidance_scale": 7.0}
    assert second["defaults"]["size"] == "1024x1024"


@pytest.mark.parametrize(
    ("state", "status", "word"),
    [
        ({"status": "ready", "workers": 4}, 200, "ready"),
        ({"status": "degraded", "workers": 3}, 200, "degraded"),
        ({"status": "starting", "workers": 0}, 503, "starting"),
        (WorkerError("gone"), 503, "unavailable"),
        (ValueError("gone"), 503, "unavailable"),
    ],
)
async def test_health(state: Any, status: int, word: str) -> None:
    async with open_client(FakeBackend(state=state)) as http:
        answer = await http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (status, word)


async def test_health_does_not_wait_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.http.routes.service_routes.HEALTH_TIMEOUT_S", 0.01)
    backend = FakeBackend()
    monkeypatch.setattr(backend, "get_health", lambda: asyncio.sleep(60))
    async with open_client(backend) as http:
        assert (await http.get("/health")).status_code == 503


async def test_about_names_routes_that_exist() -> None:
    async with open_client(FakeBackend()) as http:
        about = (await http.get("/")).json()
        document = (await http.get("/openapi.json")).json()
    described = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert set(about["routes"]) - described == {"GET /openapi.json"}
    fields = document["paths"][IMAGES]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert "num_inference_steps" in fields
