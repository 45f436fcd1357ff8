"""Quotes over HTTP and by the Python handle, and requests that are refused because they would be late."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.http.python_handle import quote
from tests.deployments.clients import IMAGES, open_client
from tests.deployments.fake_backend import MODELS, WITH_VIDEOS, FakeBackend
from tridentserve.engine.live.updates import FailedUpdate
from tridentserve.errors import InvalidRequestError, UnknownModelError


async def test_each_size_with_each_number_of_steps() -> None:
    body = {"sizes": ["64x64", "256x192"], "steps": [4, 20], "slo_ms": 1500, "true_cfg_scale": 4.0}
    async with open_client(FakeBackend()) as client:
        answer = await client.post("/v1/quotes", json=body)
    assert answer.status_code == 200, answer.text
    fields = answer.json()
    assert fields["ignored"] == ["true_cfg_scale"]
    first, late, unknown, _ = fields["data"]
    assert (first["size"], first["num_inference_steps"], first["quality"]) == ("64x64", 4, "exact")
    assert (first["predicted_s"], first["slo_s"], first["slo_met"], first["is_guess"]) == (0.4, 1.5, True, False)
    assert first["finish_at"] == pytest.approx(fields["created"] + 0.4, abs=1.0)
    assert (late["predicted_s"], late["slo_met"]) == (2.0, False)
    assert (unknown["predicted_s"], unknown["error"]["code"]) == (None, "no_prediction")


async def test_each_quality() -> None:
    answer = await quote(FakeBackend(), MODELS, {"size": "64x64", "qualities": ["exact", "fast"]})
    assert [entry["quality"] for entry in answer["data"]] == ["exact", "fast"]
    answer = await quote(FakeBackend(), MODELS, {"size": "64x64", "qualities": ["hd", "low"]})
    assert [entry["quality"] for entry in answer["data"]] == ["exact", "fast"]
    (one,) = (await quote(FakeBackend(), MODELS, {"size": "64x64", "quality": "low"}))["data"]
    assert one["quality"] == "fast"


async def test_the_handle_answers_the_same_and_quotes_videos() -> None:
    answer = await quote(FakeBackend(), WITH_VIDEOS, {"model": "tiny-wan", "size": "64x64", "num_frames": 9})
    (video,) = answer["data"]
    assert (video["model"], video["num_frames"], video["predicted_s"]) == ("tiny-wan", 9, 5.0)
    (refused,) = (await quote(FakeBackend(), MODELS, {"size": "32x32"}))["data"]
    assert (refused["predicted_s"], refused["error"]["message"]) == (None, "too small")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"sizes": ["64x64"], "size": "64x64"}, "sizes"),
        ({"steps": [4], "num_inference_steps": 4}, "steps"),
        ({"steps": [0]}, "steps"),
        ({"sizes": ["63x64"]}, "multiples"),
        ({"sizes": ["64x64"] * 5, "steps": [1, 2, 3, 4]}, "at most 16"),
        ({"qualities": ["best"]}, "qualities"),
        ({"qualities": ["fast"], "quality": "high"}, "qualities"),
        ({"sizes": []}, "sizes"),
        ({"n": 4}, "n: must be at most 3"),
    ],
)
async def test_what_cannot_be_quoted(body: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        await quote(FakeBackend(), MODELS, body)


async def test_a_quote_for_an_unknown_model() -> None:
    with pytest.raises(UnknownModelError):
        await quote(FakeBackend(), MODELS, {"model": "none"})


async def test_a_request_that_would_be_late_gets_503_with_the_time() -> None:
    backend = FakeBackend(refuse_with=FailedUpdate("r1", "deadline_missed", "it is late", predicted_s=3.5))
    body = {"prompt": "a cat", "size": "64x64", "on_late": "refuse", "priority": 2, "service_tier": "flex"}
    async with open_client(backend) as client:
        answer = await client.post(IMAGES, json=body)
    assert answer.status_code == 503
    assert (answer.json()["error"]["code"], answer.json()["error"]["predicted_s"]) == ("deadline_missed", 3.5)
    assert "Retry-After" not in answer.headers
    assert answer.headers["X-Should-Retry"] == "false", "OpenAI's clients would send it again"
    ((spec, _),) = backend.seen
    assert (spec.on_late, spec.priority, spec.weight) == ("refuse", 1, 4.0)
