"""The route of edits over a fake backend: an image in all encodings, its size, and what is refused."""

from __future__ import annotations

import io
import json
import logging
from base64 import b64encode
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from deployments.http.app import create_api
from deployments.schemas.common.parsing import parse_as
from deployments.schemas.edit import EditRequest, build_edit_request
from deployments.schemas.image_field import count_image_chars
from tests.deployments.clients import IMAGES, get_error, open_client, open_image_client, parse_events
from tests.deployments.fake_backend import MODELS, WITH_IMAGES, FakeBackend, make_png
from tridentserve.errors import InvalidRequestError
from tridentserve.models.input_image import encode_png, read_image
from tridentserve.requests import Shape

EDITS = "/v1/images/edits"
IMAGE = make_png(64, 48, "red")
BASE64 = b64encode(IMAGE).decode()
DATA_URL = f"data:image/png;base64,{BASE64}"
STEPS = {"num_inference_steps": 2}
TOO_MANY = "has 2 images, this model takes 1 at most; tiny-plus"
TOO_MANY = "has 2 images, this model takes 1 at most; tiny-plus"
BODY = {"prompt": "make it blue", **STEPS, "image": BASE64}
TEXTS = {"prompt": "make it blue", "num_inference_steps": "2"}
FILE = ("fox.png", IMAGE, "image/png")


def make_jpeg(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "green").save(buffer, "JPEG")
    return buffer.getvalue()


async def edit(backend: FakeBackend, **sent: Any) -> httpx.Response:
    async with open_image_client(backend) as http:
        return await http.post(EDITS, **sent)


@pytest.mark.parametrize(
    "sent",
    [
        {"data": TEXTS, "files": {"image": FILE}},
        {"data": TEXTS, "files": {"image[]": FILE}},
        {"data": {"prompt": "make it blue", "extra_body": json.dumps(STEPS)}, "files": {"image": FILE}},
        {"data": {**TEXTS, "image": BASE64}},
        {"json": BODY},
        {"json": {**BODY, "image": DATA_URL}},
        {"json": {**BODY, "image": [DATA_URL]}},
        {"json": {**BODY, "image": {"image_url": DATA_URL}}},
        {"json": {**BODY, "image": "\n".join(BASE64[i : i + 76] for i in range(0, len(BASE64), 76))}},
        {"json": {"prompt": "make it blue", "extra_body": {**STEPS, "image": BASE64}}},
        {"json": {"prompt": "make it blue", **STEPS, "images": [{"image_url": DATA_URL}]}},
        {"files": {**{name: (None, text) for name, text in TEXTS.items()}, "image[]": (None, BASE64)}},
        {"files": {**{name: (None, text) for name, text in TEXTS.items()}, "image": (None, IMAGE)}},
        {"data": {**TEXTS, "input_fidelity": "high", "partial_images": "0"}, "files": {"image": FILE}},
        {"json": {**BODY, "input_fidelity": "low", "partial_images": 0}},
    ],
    ids=[
        *("file", "file[]", "extra_body", "urlencoded", "base64", "url", "list", "object", "lines", "json extra_body"),
        *("images", "text[]", "file without a name", "openai's form", "openai's JSON"),
    ],
)
async def test_all_encodings_give_the_same_request(sent: dict[str, Any]) -> None:
    backend = FakeBackend()
    answer = await edit(backend, **sent)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["model"], answer.json()["size"], len(answer.json()["data"])) == ("tiny-kontext", "64x48", 1)
    ((spec, inputs),) = backend.seen
    assert inputs.image == encode_png(read_image(IMAGE, 10**6))
    assert (inputs.prompt, inputs.num_inference_steps, spec.shape) == ("make it blue", 2, Shape(48, 64))


async def test_the_fields_of_a_generation_hold() -> None:
    backend = FakeBackend()
    fields = {"n": "2", "size": "128x64", "seed": "7", "guidance_scale": "1.5", "slo_ms": "900", "lora": "ink"}
    more = {"model": "tiny-kontext", "request_id": "r1", "user": "me", "response_format": "b64_json"}
    answer = await edit(backend, data={**TEXTS, **fields, **more}, files={"image": FILE})
    assert answer.status_code == 200, answer.text
    ((spec, inputs),) = backend.seen
    assert (spec.request_id, spec.num_outputs, spec.shape, spec.slo_s, spec.loras) == (
        "r1",
        2,
        Shape(64, 128),
        0.9,
        ("tiny-kontext:ink",),
    )
    assert (inputs.seed, inputs.guidance_scale) == (7, 1.5)


@pytest.mark.parametrize("asked", [{}, {"size": "auto"}])
@pytest.mark.parametrize(
    ("sent", "size"),
    [((64, 48), "64x48"), ((65, 40), "64x32"), ((16, 16), "32x32"), ((512, 384), "256x192"), ((10, 900), "32x256")],
)
async def test_the_size_follows_the_image(asked: dict[str, str], sent: tuple[int, int], size: str) -> None:
    answer = await edit(FakeBackend(), data={**TEXTS, **asked}, files={"image": make_jpeg(*sent)})
    assert answer.json()["size"] == size


async def test_a_large_image_travels_in_the_size_of_the_result() -> None:
    backend = FakeBackend()
    for size in ("64x48", "256x192"):
        await edit(backend, data={**TEXTS, "size": size}, files={"image": make_jpeg(128, 96)})
    sizes = [Image.open(io.BytesIO(inputs.image or b"")).size for _, inputs in backend.seen]
    assert sizes == [(64, 48), (128, 96)]


@pytest.mark.parametrize("kind", ["image/png", "application/json; charset=utf-16"])
async def test_the_content_type_is_reported(kind: str) -> None:
    answer = await edit(FakeBackend(), content=IMAGE, headers={"Content-Type": kind})
    says = "names another charset" if "charset" in kind else "an image is a file of a multipart form, or base64 in JSON"
    assert (answer.status_code, says in get_error(answer)["message"]) == (415, True)


async def test_a_stream() -> None:
    answer = await edit(FakeBackend(), data={**TEXTS, "stream": "true"}, files={"image": FILE})
    states = ["queued", "progress", "progress", "completed"]
    assert [name for name, _ in parse_events(answer.text)] == [f"image_edit.{state}" for state in states]


@pytest.mark.parametrize(
    ("sent", "param", "says"),
    [
        ({"data": TEXTS}, "image", "is required"),
        ({"json": {**BODY, "image": None}}, "image", "is required"),
        (
            {"data": TEXTS, "files": [("image", FILE), ("image", FILE)]},
            "image",
            "has 2 images, this model takes 1 at most; tiny-plus",
        ),
        (
            {"data": TEXTS, "files": [("image[]", FILE), ("image[]", FILE)]},
            "image",
            "has 2 images, this model takes 1 at most; tiny-plus",
        ),
        ({"json": {**BODY, "image": [BASE64, BASE64]}}, "image", TOO_MANY),
        (
            {"data": {**TEXTS, "model": "tiny-kontext"}, "files": {"image": FILE, "mask": FILE}},
            "mask",
            "must be left out: flux_kontext makes the whole image; tiny-fill would take it",
        ),
        ({"json": {**BODY, "model": "tiny-fill"}}, "mask", "is required: flux_fill paints the masked part of an image"),
        ({"data": TEXTS, "files": {"image": FILE, "mask": ("m.png", make_png(48, 64))}}, "mask", "image, 64x48 pixels"),
        (
            {"data": TEXTS, "files": {"image": FILE, "mask": ("m.png", make_png(65, 48))}},
            "mask",
            "more than 3072 pixels",
        ),
        ({"data": TEXTS, "files": {"image": FILE, "mask": b"%PDF"}}, "mask", "mask: cannot be read"),
        ({"json": {**BODY, "mask": "http://host/mask.png"}}, "mask", "nothing is fetched"),
        ({"data": {**TEXTS, "image": BASE64}, "files": {"image": FILE}}, "image", "image: is given twice in the form"),
        ({"data": TEXTS, "files": {"image": b""}}, "image", "empty"),
        ({"json": {**BODY, "image": ""}}, "image", "empty"),
        ({"json": {**BODY, "image": []}}, "image", "must be an image"),
        ({"json": {**BODY, "image": 7}}, "image", "must be an image"),
        ({"json": {**BODY, "image": [[BASE64]]}}, "image", "must be an image"),
        ({"json": {**BODY, "image": "http://host/fox.png"}}, "image", "nothing is fetched"),
        ({"json": {**BODY, "image": {"image_url": "https://host/fox.png"}}}, "image", "nothing is fetched"),
        ({"json": {**BODY, "image": "file:///etc/passwd"}}, "image", "nothing is fetched"),
        ({"json": {**BODY, "image": {"file_id": "f"}}}, "image", "no files are stored"),
        ({"json": {**BODY, "image": "fox.png"}}, "image", "base64"),
        ({"json": {**BODY, "image": "not one: a text"}}, "image", "is not valid base64; send the image itself"),
        ({"json": {**BODY, "images": [BASE64]}}, "images", "images: must not be given twice"),
        ({"json": {**BODY, "input_reference": BASE64}}, "input_reference", "is called image here"),
        ({"json": {**BODY, "image": "/etc/passwd"}}, "image", "base64"),
        ({"json": {**BODY, "image": "é" * 8}}, "image", "base64"),
        ({"json": {**BODY, "image": "data:image/png,abc"}}, "image", "a data URL must hold base64"),
        ({"json": {**BODY, "image": BASE64[: len(BASE64) // 8 * 4]}}, "image", "cannot be read"),
        ({"data": TEXTS, "files": {"image": b"%PDF-1.7"}}, "image", "cannot be read"),
        ({"data": TEXTS, "files": {"image": make_png(1001, 1000)}}, "image", "more than 1000000 pixels"),
        ({"data": TEXTS, "files": {"image": bytes(2**20 + 1)}}, "image", "more than 1048576 bytes"),
        ({"json": {**BODY, "image": "A" * (2**20 // 3 * 4 + 8)}}, "image", "more than 1048576 bytes"),
        ({"data": TEXTS, "files": {"image": FILE, "prompt": ("prompt.txt", b"a fox")}}, "prompt", "given twice"),
        ({"data": {"num_inference_steps": "2"}, "files": {"image": FILE, "prompt": b"a fox"}}, "prompt", "string"),
        ({"data": {**TEXTS, "size": "65x64"}, "files": {"image": FILE}}, "size", "multiples of 16"),
        ({"data": {**TEXTS, "colour": "red"}, "files": {"image": FILE}}, "colour", "unknown field"),
        ({"data": {**TEXTS, "response_format": "xml"}, "files": {"image": FILE}}, "response_format", "should be"),
    ],
)
async def test_what_is_refused(sent: dict[str, Any], param: str | None, says: str) -> None:
    backend = FakeBackend()
    answer = await edit(backend, **sent)
    assert (answer.status_code, get_error(answer)["param"]) == (422, param), answer.text
    assert says in get_error(answer)["message"]
    assert "passwd" not in answer.text
    assert not backend.seen


OTHER = make_png(96, 160, "blue")
OTHER_FILE = ("pond.png", OTHER, "image/png")


@pytest.mark.parametrize(
    "sent",
    [
        {"files": [("image", FILE), ("image", OTHER_FILE)]},
        {"files": [("image[]", FILE), ("image[]", OTHER_FILE)]},
        {"json": {"image": [BASE64, b64encode(OTHER).decode()]}},
        {"json": {"images": [{"image_url": DATA_URL}, b64encode(OTHER).decode()]}},
    ],
    ids=["image", "image[]", "list", "images"],
)
async def test_several_images(sent: dict[str, Any]) -> None:
    backend, fields = FakeBackend(), {"prompt": "the first beside the second", "model": "tiny-plus"}
    if "json" in sent:
        answer = await edit(backend, json={**fields, **sent["json"]})
    else:
        answer = await edit(backend, data=fields, **sent)
    assert answer.status_code == 200, answer.text
    ((spec, inputs),) = backend.seen
    assert inputs.images == tuple(encode_png(read_image(content, 10**6)) for content in (IMAGE, OTHER))
    assert spec.shape == Shape(48, 64)  # the first image's
    # D has 4096 tokens of each image; the profile of the size has those of one.
    assert spec.token_ratio == inputs.token_ratio == (12 + 2 * 4096) / (12 + 4096)


def make_mask(kind: str) -> bytes:
    """The left half is to be painted anew."""
    if kind == "transparent":
        mask = Image.new("RGBA", (64, 48), (9, 9, 9, 255))
        mask.paste((200, 0, 0, 0), (0, 0, 32, 48))
    else:
        mask = Image.new(kind, (64, 48), "black")
        mask.paste("white", (0, 0, 32, 48))
    buffer = io.BytesIO()
    mask.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["transparent", "RGB", "L", "1", "RGBA"])
async def test_a_mask_is_transparent_or_white_where_to_paint(kind: str) -> None:
    backend, mask = FakeBackend(), make_mask(kind)
    for sent in (
        {"data": TEXTS, "files": {"image": FILE, "mask": ("mask.png", mask)}},
        {"json": {**BODY, "mask": b64encode(mask).decode()}},
    ):
        answer = await edit(backend, **sent)
        assert answer.status_code == 200, answer.text
    assert {spec.model for spec, _ in backend.seen} == {"tiny-fill"}  # none is named, and this one takes masks
    for _, inputs in backend.seen:
        painted = np.asarray(Image.open(io.BytesIO(inputs.mask or b"")))
        assert painted.shape == (48, 64)
        assert (painted[:, :32] == 255).all()
        assert (painted[:, 32:] == 0).all()


def test_a_service_that_paints_no_part_of_an_image_says_so() -> None:
    request = parse_as(EditRequest, {**BODY, "mask": b64encode(make_mask("L")).decode()})
    only = {"tiny-kontext": WITH_IMAGES["tiny-kontext"]}
    with pytest.raises(InvalidRequestError, match="makes the whole image; no served model would take it"):
        build_edit_request(request, only)


async def test_a_model_that_may_do_without_images() -> None:
    backend, square = FakeBackend(), b64encode(make_png(64, 64, "red")).decode()
    async with open_image_client(backend) as http:
        for image in (square, [square, square]):
            body = {"prompt": "blue", "model": "tiny-klein", "image": image}
            assert (await http.post(EDITS, json=body)).status_code == 200
        assert (await http.post(IMAGES, json={"prompt": "blue", "model": "tiny-klein"})).status_code == 200
        refused = await http.post(EDITS, json={"prompt": "blue", "model": "tiny-klein", "image": BASE64})
    assert "at least 64 pixels" in get_error(refused)["message"]
    assert [(len(inputs.images), spec.token_ratio) for spec, inputs in backend.seen] == [(1, 2.0), (2, 3.0), (0, 1.0)]


@pytest.mark.parametrize(
    ("model", "images", "param", "says"),
    [
        ("tiny-klein", [IMAGE] * 3, "image", "has 3 images, this model takes 2 at most; tiny-plus would take"),
        ("tiny-plus", [IMAGE] * 4, "image", "has 4 images, this model takes 3 at most"),
        ("tiny-plus", [IMAGE, b""], "image[1]", "image[1]: is an empty file"),
        ("tiny-plus", [make_png(800, 800), make_png(700, 700)], "image[1]", "pixels, the most that this model takes b"),
        ("tiny-plus", [make_png(64, 64), bytes(2**20)], "image[1]", "bytes, the most that this model takes beside"),
    ],
)
async def test_bounds_hold_for_all_images_together(model: str, images: list[bytes], param: str, says: str) -> None:
    files = [("image[]", ("a.png", content, "image/png")) for content in images]
    answer = await edit(FakeBackend(), data={**TEXTS, "model": model}, files=files)
    assert (answer.status_code, get_error(answer)["param"]) == (422, param), answer.text
    assert says in get_error(answer)["message"]


@pytest.mark.parametrize(
    ("path", "model", "status", "says"),
    [
        (IMAGES, "tiny-kontext", 404, "edits images; send the request to /v1/images/edits"),
        (EDITS, "tiny-wan", 404, "makes videos; send the request to /v1/videos"),
        (EDITS, "tiny-wan-i2v", 404, "makes videos; send the request to /v1/videos"),
        ("/v1/videos", "tiny-kontext", 404, "edits images; send the request to /v1/images/edits"),
        (EDITS, "dall-e-3", 404, "there are tiny-kontext"),
        (IMAGES, None, 422, "unknown field image; an image to edit goes to POST /v1/images/edits"),
    ],
)
async def test_models_have_routes_of_their_own(path: str, model: str | None, status: int, says: str) -> None:
    body = {"prompt": "a fox", "model": model} | ({"image": BASE64} if path == EDITS or model is None else {})
    async with open_image_client(FakeBackend()) as http:
        answer = await http.post(path, json=body)
    assert (answer.status_code, says in get_error(answer)["message"]) == (status, True), answer.text


async def test_a_service_that_edits_nothing() -> None:
    async with open_client(FakeBackend()) as http:
        answer = await http.post(EDITS, json=BODY)
        assert (answer.status_code, get_error(answer)["param"]) == (422, "image")
        assert (
            "tiny-sd3 starts from a prompt alone; `limits.max_images: 1` of this model" in get_error(answer)["message"]
        )
        # A body that has room for an image is read, so that its error is the one that helps.
        assert (await http.post(EDITS, json={**BODY, "image": "A" * 2**20})).status_code == 422
    app = create_api(FakeBackend(), {"tiny-wan": WITH_IMAGES["tiny-wan"]})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = await http.post(EDITS, json=BODY)
        assert (answer.status_code, get_error(answer)["param"]) == (404, "model")
        assert "none of the served models edits images" in answer.text
        assert (await http.post(EDITS, json={**BODY, "image": "A" * 2**20})).status_code == 413


async def test_bodies_may_have_an_image_in_addition_to_the_other_fields() -> None:
    most = 2**20 + count_image_chars(WITH_IMAGES)
    assert count_image_chars({"tiny-wan": WITH_IMAGES["tiny-wan"]}) == 0
    video_model = WITH_IMAGES["tiny-wan-i2v"]
    assert most == 2**20 + 4 * -(-video_model.limits.max_image_bytes // 3)
    assert count_image_chars(MODELS) == most - 2**20  # they could take images
    async with open_image_client(FakeBackend()) as http:
        body = json.dumps({**BODY, "image": ""}).encode()
        for size, status in ((most, 422), (most + 1, 413)):
            content = body + b" " * (size - len(body))
            answer = await http.post(EDITS, content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == status
        # The other routes take no more than before.
        assert (await http.post(IMAGES, json={"prompt": "x" * 2**20})).status_code == 413


async def test_nothing_of_an_image_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    backend = FakeBackend()
    for content in (IMAGE, IMAGE[:60], b"canary-7f3a"):
        await edit(backend, json={**BODY, "image": b64encode(content).decode()})
    assert len(backend.seen) == 1
    assert "canary" not in caplog.text
    assert BASE64[:24] not in caplog.text
    assert str(IMAGE[:8])[2:-1] not in caplog.text + repr(backend.seen)


async def test_models_say_what_they_take() -> None:
    async with open_image_client(FakeBackend()) as http:
        told = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
    takes = {name: model["input_modalities"] for name, model in told.items() if "image" in model["input_modalities"]}
    assert set(takes) == {"tiny-kontext", "tiny-fill", "tiny-plus", "tiny-klein", "tiny-wan-i2v"}
    assert {name for name, model in told.items() if model["takes_mask"]} == {"tiny-fill"}
    assert {tuple(modalities) for modalities in takes.values()} == {("text", "image")}
    numbers = {name: tuple(model["input_images"].values()) for name, model in told.items()}
    assert [numbers[name] for name in ("tiny-kontext", "tiny-plus", "tiny-klein", "tiny-wan-i2v", "tiny-sd3")] == [
        (1, 1),
        (1, 3),
        (0, 2),
        (1, 1),
        (0, 0),
    ]
    assert told["tiny-klein"]["defaults"]["size"] != "auto"
    assert told["tiny-kontext"]["defaults"]["size"] == "auto"
    assert told["tiny-kontext"]["limits"]["max_image_bytes"] == 2**20
    assert told["tiny-wan"]["input_modalities"] == ["text"]
    assert "max_image_pixels" not in told["tiny-wan"]["limits"]
