"""Video requests in each of the forms that clients send, and those that are refused."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace
from typing import Any

import pytest

from deployments.config.models import Limits
from deployments.models.served import ServedModel
from deployments.schemas.image import build_image_request
from deployments.schemas.video import build_video_request, parse_video_request
from tests.deployments.fake_backend import MODELS, VIDEO_LIMITS, WITH_IMAGES, WITH_VIDEOS, make_png
from tridentserve.errors import InvalidRequestError, UnknownModelError
from tridentserve.models.families import FAMILIES
from tridentserve.models.input_image import encode_png, read_image
from tridentserve.requests import GenerationInputs, RequestSpec, Shape


def accept(strict: bool = True, **fields: Any) -> tuple[RequestSpec, GenerationInputs]:
    return build_video_request(parse_video_request({"prompt": "a fox", **fields}, strict), WITH_VIDEOS)


def refuse(strict: bool = True, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        accept(strict, **fields)
    return caught.value


def test_defaults_are_those_of_the_first_model_that_makes_videos() -> None:
    spec, inputs = accept()
    assert (spec.model, spec.shape) == ("tiny-wan", Shape(256, 256, 1))  # 480x832x81, as far as the limits allow it
    assert (spec.num_inference_steps, inputs.guidance_scale, inputs.fps) == (50, 5.0, 16.0)
    assert inputs.output_format == "mp4"
    assert spec.request_id.startswith("video_")


def test_a_size_without_a_length_has_as_many_frames_as_the_limits_allow() -> None:
    assert accept(size="128x128")[0].shape.num_frames == 1
    assert accept(size="64x64", model="tiny-wan")[0].shape.num_frames == 1


@pytest.mark.parametrize(
    ("fields", "frames", "fps"),
    [
        ({"num_frames": 9}, 9, 16.0),
        ({"num_frames": 9, "seconds": "3", "fps": 8}, 9, 8.0),
        ({"seconds": "1"}, 17, 16.0),
        ({"seconds": 1, "fps": 8}, 9, 8.0),
        ({"seconds": 0.01}, 1, 16.0),
        ({"seconds": "1.5", "fps": 4}, 5, 4.0),
    ],
)
def test_a_length_is_frames_or_seconds(fields: dict[str, Any], frames: int, fps: float) -> None:
    spec, inputs = accept(size="64x64", **fields)
    assert (spec.shape, inputs.shape, inputs.fps) == (Shape(64, 64, frames), Shape(64, 64, frames), fps)


def test_numbers_of_forms_are_texts() -> None:
    fields = {"height": "64", "width": "96", "num_frames": "5", "num_inference_steps": "4", "fps": "8", "seed": "3"}
    spec, inputs = accept(strict=False, **fields, guidance_scale="2.5", n="2", priority="-1")
    assert (spec.shape, spec.num_inference_steps, spec.num_outputs) == (Shape(64, 96, 5), 4, 2)
    assert (inputs.fps, inputs.seed, inputs.guidance_scale) == (8.0, 3, 2.5)
    assert refuse(strict=False, num_frames="five").param == "num_frames"
    assert refuse(num_frames="5").param == "num_frames"


def test_outputs_have_two_names() -> None:
    assert accept(num_outputs_per_prompt=2)[0].num_outputs == 2
    assert accept(num_outputs_per_prompt=2, n=2)[0].num_outputs == 2
    assert refuse(num_outputs_per_prompt=2, n=1).param == "n"
    assert refuse(num_outputs_per_prompt=3).param == "n"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"num_frames": 6}, "num_frames", "1 plus a multiple of 4"),
        ({"num_frames": 37}, "num_frames", "at most 33"),
        ({"seconds": "4"}, "seconds", "65 frames; at most 33"),
        ({"seconds": "soon"}, "seconds", "a number, such as 4"),
        ({"seconds": "nan"}, "seconds", ""),
        ({"seconds": "-1"}, "seconds", ""),
        ({"size": "128x128", "num_frames": 21}, "num_frames", "pixels times frames"),
        ({"size": "65x64"}, "size", "multiples of 16"),
        ({"size": "512x512"}, "size", ""),
        ({"fps": 0}, "fps", ""),
        ({"fps": 121}, "fps", ""),
        ({"priority": 1001}, "priority", ""),
        ({"output_format": "webm"}, "output_format", ""),
        ({"output_format": "frames"}, "output_format", ""),
        ({"input_reference": "x.png"}, "input_reference", "must be left out"),
        ({"stream": True}, "stream", "are not streamed"),
        ({"prompt": " "}, "prompt", ""),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str, says: str) -> None:
    error = refuse(**fields)
    assert error.param == param
    assert says in str(error)


def test_images_and_videos_have_models_of_their_own() -> None:
    with pytest.raises(UnknownModelError, match="makes images; send the request to /v1/images/generations"):
        accept(model="tiny-sd3")
    with pytest.raises(UnknownModelError, match="makes videos; send the request to /v1/videos"):
        build_image_request({"prompt": "a fox", "model": "tiny-wan"}, WITH_VIDEOS)
    with pytest.raises(UnknownModelError, match="none of the served models makes videos"):
        build_video_request(parse_video_request({"prompt": "a fox"}), MODELS)
    with pytest.raises(UnknownModelError, match="is not served; there are tiny-wan"):
        accept(model="sora-2")


@pytest.mark.parametrize(("image", "size"), [((60, 100), (192, 320)), ((100, 60), (320, 192)), ((9, 9), (256, 256))])
def test_a_video_without_a_size_is_like_its_image(image: tuple[int, int], size: tuple[int, int]) -> None:
    """With the pixels of the default, 256x256."""
    limits = Limits(min_side=32, max_side=320, max_pixels=256 * 256, max_frames=9)
    model = ServedModel("m", FAMILIES["wan_i2v"], limits)
    fields = {"prompt": "a fox", "input_reference": b64encode(make_png(*image)).decode()}
    spec, inputs = build_video_request(parse_video_request(fields), {"m": model})
    assert (spec.shape, inputs.shape) == (Shape(size[1], size[0], 9), spec.shape)
    named, _ = build_video_request(parse_video_request({**fields, "size": "64x32"}), {"m": model})
    assert named.shape == Shape(32, 64, 9)
    same, _ = build_video_request(parse_video_request(fields), {"m": replace(model, family=FAMILIES["cogvideox_i2v"])})
    assert same.shape == model.default_shape


def test_a_video_starts_from_an_image_where_its_model_does() -> None:
    image = make_png(100, 60)

    def made(**fields: Any) -> tuple[RequestSpec, GenerationInputs]:
        return build_video_request(parse_video_request({"prompt": "a fox", **fields}), WITH_IMAGES)

    spec, inputs = made(input_reference=b64encode(image).decode(), size="64x64", num_frames=5)
    assert (spec.model, spec.shape, inputs.image) == (
        "tiny-wan-i2v",
        Shape(64, 64, 5),
        encode_png(read_image(image, 10**6)),
    )
    assert made()[0].model == "tiny-wan"
    for fields, says in (
        ({"model": "tiny-wan-i2v"}, "input_reference: is required"),
        ({"model": "tiny-wan", "input_reference": "eA=="}, "input_reference: must be left out"),
        ({"input_reference": "eA=="}, "input_reference: cannot be read"),
        ({"input_reference": {"image_url": "https://x/y.png"}}, "nothing is fetched"),
        ({"model": "tiny-kontext"}, "edits images; send the request to /v1/images/edits"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            made(**fields)
    with pytest.raises(InvalidRequestError, match="starts from a prompt alone; tiny-wan-i2v would take the request"):
        made(model="tiny-wan", input_reference="eA==")
    with pytest.raises(InvalidRequestError, match="starts from an image; tiny-wan would take the request as it is"):
        made(model="tiny-wan-i2v")
    with pytest.raises(InvalidRequestError, match=r"unknown field image; .* is called input_reference here"):
        made(image="eA==")
    both = {"tiny-wan-i2v": WITH_IMAGES["tiny-wan-i2v"], "ltx": ServedModel("ltx", FAMILIES["ltx2"], VIDEO_LIMITS)}
    for name, sent in (("tiny-wan-i2v", image), ("ltx", None)):
        spec, _ = build_video_request(parse_video_request({"prompt": "a fox", "input_reference": sent}), both)
        assert spec.model == name
    for sent in (image, None):
        body = {"prompt": "a fox", "model": "ltx", "size": "64x64", "input_reference": sent}
        spec, inputs = build_video_request(parse_video_request(body), both)
        assert (spec.token_ratio, inputs.image is None) == (1.0, sent is None)
    with pytest.raises(InvalidRequestError, match="starts from an image; ltx would take the request as it is"):
        build_video_request(parse_video_request({"prompt": "a fox", "model": "tiny-wan-i2v"}), both)
    only = {"tiny-wan-i2v": WITH_IMAGES["tiny-wan-i2v"]}
    with pytest.raises(InvalidRequestError, match="input_reference: is required"):
        build_video_request(parse_video_request({"prompt": "a fox"}), only)
