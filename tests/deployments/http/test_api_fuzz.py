"""Bodies nobody thought of: each is answered, with 200 or with an error in OpenAI's form, and never with a 5xx."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.schemas.common.parsing import parse_as
from deployments.schemas.edit import EditRequest, build_edit_request
from deployments.schemas.image import ImageRequest
from deployments.schemas.video import build_video_request, parse_video_request
from tests.deployments.clients import IMAGES, open_client
from tests.deployments.fake_backend import LIMITS, MODELS, WITH_IMAGES, FakeBackend, make_png
from tridentserve.errors import InvalidRequestError

ANY_TEXT = st.text(st.characters(), max_size=20)  # lone surrogates included
ANY_NUMBER = st.integers() | st.floats() | st.sampled_from([0, 1, 2**31, 2**63 - 1, 2**63, 10**30, 1e308])
LEAF = st.none() | st.booleans() | ANY_NUMBER | ANY_TEXT
ANY_JSON = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3))
LIKELY = st.sampled_from(
    ["a cat", "64x64", "256x192", "tiny-flux", "b64_json", "png", "auto", 1, 2, 64, 128, 0.5, True]
)
NAMES = st.sampled_from([*ImageRequest.model_fields, "extra_body", "priority"])
FIELDS = st.dictionaries(NAMES | ANY_TEXT, LIKELY | ANY_JSON, max_size=6)
REQUEST = st.builds(
    lambda fields, prompt, extra: {**fields, **prompt, **extra},
    FIELDS,
    st.just({"prompt": "a cat"}) | st.just({}),
    st.just({}) | FIELDS.map(lambda fields: {"extra_body": fields}),
)
SIZES = st.integers(-16, 300) | st.sampled_from([16, 32, 64, 128, 192, 256, 272])


def post(content: bytes) -> FakeBackend:
    """Posts the body and checks the answer; returns the backend behind."""
    backend = FakeBackend()

    async def call() -> None:
        async with open_client(backend) as http:
            answer = await http.post(IMAGES, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 404, 422)
        if answer.status_code != 200:
            assert (answer.status_code == 404) == (answer.json()["error"]["code"] == "model_not_found")
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert not backend.seen

    asyncio.run(call())
    assert not backend.running
    return backend


@settings(max_examples=40)
@given(st.binary(max_size=200))
def test_any_bytes(content: bytes) -> None:
    post(content)


@settings(max_examples=40)
@given(ANY_JSON)
def test_any_json(value: Any) -> None:
    post(json.dumps(value).encode())


@settings(max_examples=80)
@given(REQUEST)
def test_any_fields(value: dict[str, Any]) -> None:
    backend = post(json.dumps(value).encode())
    for spec, inputs in backend.seen:
        limits = MODELS[spec.model].limits
        assert spec.shape.width % 16 == spec.shape.height % 16 == 0
        assert spec.shape.pixels <= limits.max_pixels
        assert 1 <= spec.num_inference_steps <= limits.max_steps
        assert 1 <= spec.num_outputs <= limits.max_outputs
        assert 0 <= inputs.seed < 2**63
        assert inputs.prompt.strip()


IMAGE = b64encode(make_png(40, 30)).decode()
IMAGE_VALUES = (
    ANY_JSON
    | st.binary(max_size=40).map(lambda content: b64encode(content).decode())
    | st.integers(0, len(IMAGE)).map(lambda end: IMAGE[:end])
    | st.sampled_from([IMAGE, [IMAGE], {"image_url": f"data:image/png;base64,{IMAGE}"}])
)


@settings(max_examples=60)
@given(IMAGE_VALUES, REQUEST, st.booleans())
def test_any_image(image: Any, fields: dict[str, Any], strict: bool) -> None:
    """Made or refused in our own words, whatever stands in the field."""
    body = {"prompt": "x", **fields}
    with suppress(InvalidRequestError):
        spec, inputs = build_edit_request(parse_as(EditRequest, {**body, "image": image}, strict), WITH_IMAGES)
        assert (WITH_IMAGES[spec.model].family.name, inputs.image is None) == ("flux_kontext", False)
    with suppress(InvalidRequestError):
        spec, inputs = build_video_request(parse_video_request({**body, "input_reference": image}, strict), WITH_IMAGES)
        assert (inputs.image is not None) == WITH_IMAGES[spec.model].takes_image


@settings(max_examples=60)
@given(SIZES, SIZES)
def test_exactly_the_sizes_within_the_limits_are_served(width: int, height: int) -> None:
    good = all(side % 16 == 0 and LIMITS.min_side <= side <= LIMITS.max_side for side in (width, height))
    good = good and width * height <= LIMITS.max_pixels
    for fields in ({"size": f"{width}x{height}"}, {"width": width, "height": height}):
        backend = post(json.dumps({"prompt": "x", "num_inference_steps": 1, **fields}).encode())
        assert [(spec.shape.width, spec.shape.height) for spec, _ in backend.seen] == [(width, height)] * good
