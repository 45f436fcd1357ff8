"""Models that make images from text and may start from an image: how far it is changed, under which mask, and who is
allowed to."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import httpx
import pytest

from deployments.http.app import create_api
from deployments.http.python_handle import generate, quote
from tests.deployments.clients import IMAGES, get_error, parse_events
from tests.deployments.fake_backend import WITH_STARTS, FakeBackend, make_png
from tridentserve.errors import InvalidRequestError
from tridentserve.models.input_image import encode_png, read_image
from tridentserve.requests import ImageStart, Shape

EDITS = "/v1/images/edits"
IMAGE = make_png(64, 48, "red")
MASK = make_png(64, 48, "white")
BASE64 = b64encode(IMAGE).decode()
TEXTS = {"prompt": "make it blue", "num_inference_steps": "10", "model": "tiny-start"}
BODY = {"prompt": "make it blue", "num_inference_steps": 10, "model": "tiny-start", "image": BASE64}


async def send(backend: FakeBackend, path: str, **sent: Any) -> httpx.Response:
    transport = httpx.ASGITransport(create_api(backend, WITH_STARTS))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.post(path, **sent)


@pytest.mark.parametrize(
    ("fields", "has_mask", "start", "steps"),
    [
        ({}, False, ImageStart(0.6), 6),
        ({"strength": "0.25"}, False, ImageStart(0.25), 3),
        ({"strength": "1"}, True, ImageStart(1.0, has_mask=True), 10),
        ({"model": "tiny-xl"}, False, ImageStart(0.3, rounds_down=True), 3),
        ({"model": "tiny-xl"}, True, ImageStart(0.9999, has_mask=True, rounds_down=True), 9),
    ],
)
async def test_a_strength_leaves_so_many_steps(
    fields: dict[str, str], has_mask: bool, start: ImageStart, steps: int
) -> None:
    backend, files = FakeBackend(), {"image": ("fox.png", IMAGE, "image/png")}
    answer = await send(
        backend, EDITS, data={**TEXTS, **fields}, files={**files, **({"mask": ("m.png", MASK)} if has_mask else {})}
    )
    assert answer.status_code == 200, answer.text
    ((spec, inputs),) = backend.seen
    assert (inputs.start, inputs.num_inference_steps, inputs.computed_steps) == (start, 10, steps)
    assert (spec.num_inference_steps, spec.shape, spec.token_ratio) == (steps, Shape(48, 64), 1.0)
    assert inputs.image == encode_png(read_image(IMAGE, 10**6))
    assert (inputs.mask is not None) == has_mask
    assert "ignored" not in answer.json()


async def test_progress_counts_the_steps_that_are_computed() -> None:
    answer = await send(FakeBackend(), EDITS, json={**BODY, "strength": 0.35, "stream": True})
    events = [event for _, event in parse_events(answer.text)]
    assert [(event["step"], event["num_steps"]) for event in events if "num_steps" in event] == [
        (step, 4) for step in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"strength": 0}, "strength", "greater than 0"),
        ({"strength": 1.01}, "strength", "less than or equal to 1"),
        ({"strength": "much"}, "strength", "strength: "),
        ({"model": "tiny-xl", "num_inference_steps": 3}, "strength", "0.3 of 3 steps is less than one; raise it"),
        ({"image": [BASE64, BASE64]}, "image", "has 2 images, this model takes 1 at most"),
        ({"mask": b64encode(make_png(48, 64)).decode()}, "mask", "must have the size of the image, 64x48 pixels"),
        ({"model": "tiny-sd3"}, "image", "tiny-sd3 starts from a prompt alone; `limits.max_images: 1` of this model"),
        ({"model": "tiny-kontext", "mask": BASE64}, "mask", "tiny-start, tiny-fill, tiny-xl would take it"),
    ],
)
async def test_what_cannot_be_is_refused(fields: dict[str, Any], param: str, says: str) -> None:
    backend = FakeBackend()
    answer = await send(backend, EDITS, json={**BODY, **fields})
    assert (answer.status_code, get_error(answer)["param"]) == (422, param), answer.text
    assert says in get_error(answer)["message"]
    assert not backend.seen


async def test_other_models_ignore_a_strength() -> None:
    answer = await send(FakeBackend(), EDITS, json={**BODY, "model": "tiny-kontext", "strength": 0.5})
    assert (answer.status_code, answer.json()["ignored"]) == (200, ["strength"])
    backend = FakeBackend()
    answer = await send(backend, IMAGES, json={"prompt": "a fox", "strength": 0.5})
    assert (answer.status_code, "goes to POST /v1/images/edits" in answer.text) == (422, True)
    # Without an image, such a model is what it was, and stays the default of both routes.
    assert (await send(backend, IMAGES, json={"prompt": "a fox", "size": "64x64"})).json()["model"] == "tiny-start"
    edit = {name: value for name, value in BODY.items() if name != "model"}
    for mask in ({}, {"mask": b64encode(MASK).decode()}):
        assert (await send(backend, EDITS, json={**edit, **mask})).json()["model"] == "tiny-start"
    assert [inputs.start is None for _, inputs in backend.seen] == [True, False, False]
    assert backend.seen[0][1].image is None


async def test_a_chat_may_start_from_an_image() -> None:
    backend = FakeBackend()
    parts = [
        {"type": "text", "text": "make it blue"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}},
    ]
    chat = {"messages": [{"role": "user", "content": parts}], "model": "tiny-start", "strength": 0.5}
    answer = await send(backend, "/v1/chat/completions", json={**chat, "num_inference_steps": 8})
    assert answer.status_code == 200, answer.text
    ((spec, inputs),) = backend.seen
    assert (spec.num_inference_steps, inputs.start) == (4, ImageStart(0.5))


async def test_the_handle_takes_the_same() -> None:
    backend = FakeBackend()
    for body in ({"model": "tiny-start"}, {}, {"mask": MASK}):
        await generate(backend, WITH_STARTS, {"prompt": "a cat", "image": IMAGE, "num_inference_steps": 5, **body})
    assert [(spec.model, spec.num_inference_steps) for spec, _ in backend.seen] == [("tiny-start", 3)] * 3
    with pytest.raises(InvalidRequestError, match=r"tiny-sd3 starts from a prompt alone; `limits\.max_images: 1`"):
        await generate(backend, WITH_STARTS, {"prompt": "a cat", "image": IMAGE, "model": "tiny-sd3"})


async def test_quotes_count_the_steps_that_are_computed() -> None:
    asked = {"size": "64x64", "steps": [10, 20], "strength": 0.3}
    answer = await quote(FakeBackend(), WITH_STARTS, {**asked, "model": "tiny-start"})
    assert [(each["num_inference_steps"], each["predicted_s"]) for each in answer["data"]] == [(3, 0.3), (6, 0.6)]
    answer = await quote(FakeBackend(), WITH_STARTS, {**asked, "model": "tiny-sd3"})
    assert [each["num_inference_steps"] for each in answer["data"]] == [10, 20]
    assert answer["ignored"] == ["strength"]
    with pytest.raises(InvalidRequestError, match=r"0\.3 of 2 steps is less than one"):
        await quote(FakeBackend(), WITH_STARTS, {"model": "tiny-xl", "size": "64x64", "steps": [2], "strength": 0.3})


async def test_models_say_that_images_and_masks_are_optional() -> None:
    transport = httpx.ASGITransport(create_api(FakeBackend(), WITH_STARTS))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        told = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
    masks = {name: (model["takes_mask"], model["needs_mask"]) for name, model in told.items()}
    assert masks["tiny-start"] == masks["tiny-xl"] == (True, False)
    assert (masks["tiny-fill"], masks["tiny-sd3"]) == ((True, True), (False, False))
    assert told["tiny-start"]["input_images"] == {"min": 0, "max": 1}
    strengths = {name: model["defaults"].get("strength") for name, model in told.items()}
    assert (strengths["tiny-start"], strengths["tiny-xl"], strengths["tiny-kontext"]) == (0.6, 0.3, None)
    assert told["tiny-xl"]["defaults"]["masked_strength"] == 0.9999
    assert told["tiny-start"]["defaults"]["size"] == "208x208"
