"""The Python handle: plain dicts in and out, and errors of ours."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from deployments.http.python_handle import generate, generate_stream
from tests.deployments.fake_backend import MODELS, WITH_IMAGES, WITH_VIDEOS, FakeBackend, make_png
from tests.deployments.fake_backend import make_video as fake_video
from tests.support.waiting import until
from tridentserve.errors import (
    InvalidRequestError,
    RequestCancelledError,
    TridentServeError,
    UnknownModelError,
    WorkerError,
)
from tridentserve.models.input_image import encode_png, read_image

BODY = {"prompt": "a cat", "size": "64x32", "num_inference_steps": 2, "request_id": "r1", "seed": 7}


async def test_a_result() -> None:
    result = await generate(FakeBackend(), MODELS, {**BODY, "n": 2})
    assert "type" not in result
    assert (result["request_id"], result["model"], result["seed"]) == ("r1", "tiny-sd3", 7)
    assert (result["width"], result["height"]) == (64, 32)
    assert [image[:4] for image in result["images"]] == [b"\x89PNG"] * 2


async def test_a_video() -> None:
    backend = FakeBackend()
    body = {**BODY, "model": "tiny-wan", "size": "64x64", "num_frames": 5}
    result = await generate(backend, WITH_VIDEOS, body)
    assert (result["videos"], result["num_frames"], result["fps"]) == ([fake_video("a cat")], 5, 16.0)
    await generate(backend, WITH_VIDEOS, {**body, "output_format": "frames", "stream": True})
    assert [inputs.output_format for _, inputs in backend.seen] == ["mp4", "frames"]
    with pytest.raises(InvalidRequestError, match="num_frames"):
        await generate(backend, WITH_VIDEOS, {"model": "tiny-sd3", "prompt": "a cat", "num_frames": 5})


@pytest.mark.parametrize("named", [True, False])
async def test_images_to_start_from(named: bool) -> None:
    backend, image = FakeBackend(), make_png(64, 48)
    edit: dict[str, Any] = {"prompt": "a cat", "num_inference_steps": 2, "image": image}
    video = {
        "prompt": "a cat",
        "size": "64x64",
        "num_inference_steps": 2,
        "input_reference": b64encode(image).decode(),
    }
    if named:
        edit["model"], video["model"] = "tiny-kontext", "tiny-wan-i2v"
    for sent in (image, memoryview(image), bytearray(image), [image], b64encode(image).decode()):
        assert (await generate(backend, WITH_IMAGES, {**edit, "image": sent}))["images"] == [image]
    assert (await generate(backend, WITH_IMAGES, video))["videos"] == [fake_video("a cat")]
    assert [spec.model for spec, _ in backend.seen] == ["tiny-kontext"] * 5 + ["tiny-wan-i2v"]
    assert {inputs.image for _, inputs in backend.seen} == {encode_png(read_image(image, 10**6))}


async def test_several_images_and_none() -> None:
    backend, image = FakeBackend(), make_png(64, 64)
    asked: list[dict[str, Any]] = [
        {"model": "tiny-plus", "image": [image, image]},
        {"model": "tiny-klein", "extra_body": {"image": image}},
        {"model": "tiny-klein"},
        {"image": image, "mask": image},
    ]
    for body in asked:
        await generate(backend, WITH_IMAGES, {"prompt": "a cat", **body})
    assert [len(inputs.images) for _, inputs in backend.seen] == [2, 1, 0, 1]
    assert backend.seen[-1][0].model == "tiny-fill"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"model": "tiny-kontext"}, "image: is required"),
        ({"model": "tiny-wan-i2v"}, "input_reference: is required"),
        ({"model": "tiny-wan", "input_reference": b"x"}, "input_reference: must be left out"),
        ({"model": "tiny-sd3", "image": b"x"}, r"image: tiny-sd3 starts from a prompt alone; `limits\.max_images: 1`"),
        ({"image": b"x"}, "image: cannot be read"),
    ],
)
async def test_images_that_lack_or_are_too_much(body: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        await generate(FakeBackend(), WITH_IMAGES, {"prompt": "a cat", **body})


@pytest.mark.parametrize("field", ["image", "input_reference"])
async def test_an_image_for_a_model_that_is_not_served(field: str) -> None:
    with pytest.raises(UnknownModelError, match=r"this model is not served; there are tiny-sd3, .*tiny-kontext"):
        await generate(FakeBackend(), WITH_IMAGES, {"prompt": "a cat", "model": "x", field: b"x"})


@pytest.mark.parametrize("body", [BODY, {**BODY, "image": b"x"}, {"prompt": "a cat", "model": "tiny-sd3"}])
async def test_while_no_model_is_served(body: dict[str, Any]) -> None:
    with pytest.raises(UnknownModelError, match="no model is, at the moment"):
        await generate(FakeBackend(), {}, body)


async def test_a_stream() -> None:
    backend = FakeBackend()
    updates = [update async for update in generate_stream(backend, MODELS, BODY)]
    assert [update["type"] for update in updates] == ["queued", "progress", "progress", "completed"]
    assert backend.ended == {"r1": "completed"}


async def test_a_stream_with_previews() -> None:
    body = {**BODY, "partial_images": 2}
    updates = [update async for update in generate_stream(FakeBackend(), MODELS, body)]
    partial = [update for update in updates if update["type"] == "partial_image"]
    assert [(update["partial_image_index"], update["step"]) for update in partial] == [(0, 1), (1, 2)]
    assert all(isinstance(image, bytes) for update in partial for image in update["images"])
    assert "ignored" not in updates[-1]
    assert (await generate(FakeBackend(), MODELS, body))["ignored"] == ["partial_images"]


async def test_a_stream_that_is_left() -> None:
    backend = FakeBackend()
    updates = generate_stream(backend, MODELS, BODY)
    async for _ in updates:
        break
    assert isinstance(updates, AsyncGenerator)
    await updates.aclose()
    assert backend.ended == {"r1": "closed"}


async def test_a_call_that_is_cancelled() -> None:
    backend = FakeBackend(allowed_steps=0)
    call = asyncio.create_task(generate(backend, MODELS, BODY))
    await until(lambda: "r1" in backend.running)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert backend.ended == {"r1": "cancelled"}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"prompt": ""}, InvalidRequestError),
        ({**BODY, "model": "x"}, UnknownModelError),
        ({**BODY, "size": "63x64"}, InvalidRequestError),
    ],
)
async def test_bad_bodies(body: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        await generate(FakeBackend(), MODELS, body)
    with pytest.raises(error):
        await anext(generate_stream(FakeBackend(), MODELS, body))


async def test_failures_are_raised() -> None:
    for fail in (RequestCancelledError("deleted"), WorkerError("lost")):
        with pytest.raises(type(fail)):
            await generate(FakeBackend(fail=fail), MODELS, BODY)
    with pytest.raises(TridentServeError, match="without a result"):
        await generate(FakeBackend(stop_after=1), MODELS, BODY)
