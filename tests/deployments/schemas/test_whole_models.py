"""Requests to pipelines that are no family: what these do not take is refused or named, and the rest reaches D."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.config.models import Limits
from deployments.models.served import ServedModel
from deployments.schemas.common.ignored_fields import list_ignored
from deployments.schemas.image import build_image_request, parse_image_request
from deployments.schemas.video import build_video_request, parse_video_request
from tridentserve.errors import InvalidRequestError
from tridentserve.models.whole.whole_family import LACKS, describe_whole_family
from tridentserve.requests import Shape


def describe(name: str, class_name: str) -> ServedModel:
    index = {"transformer": ["diffusers", "SomeModel"]}
    return ServedModel(name, describe_whole_family(class_name, index, Path("model_index.json")), Limits())


MODELS = {
    name: describe(name, class_name)
    for name, class_name in (
        ("plain", "AuraFlowPipeline"),
        ("lcm", "LatentConsistencyModelPipeline"),
        ("wuerstchen", "WuerstchenCombinedPipeline"),
        ("ltx", "LTXPipeline"),
    )
}


def build(model: str, **fields: Any) -> Any:
    return build_image_request({"prompt": "a cat", "model": model, "size": "512x512", **fields}, MODELS)


def test_a_request_is_whole_and_wants_no_previews() -> None:
    spec, inputs = build("plain", partial_images=2, preview_interval_ms=100, quality="fast", seed=1)
    assert (spec.whole, spec.quality, spec.cheaper_quality) == (True, "exact", None)
    assert not inputs.wants_previews
    assert (inputs.num_inference_steps, inputs.guidance_scale) == (50, 3.5)
    request = parse_image_request({"prompt": "a cat", "partial_images": 2, "preview_interval_ms": 100, "stream": True})
    assert list_ignored(request, MODELS["plain"], streams=True) == ("partial_images", "preview_interval_ms")


@pytest.mark.parametrize(
    ("model", "fields", "named"),
    [
        ("lcm", {"negative_prompt": "fog"}, "negative_prompt"),
        ("wuerstchen", {"guidance_scale": 3.0}, "guidance_scale"),
        ("plain", {"lora": "x"}, "lora"),
        ("plain", {"size": "520x512"}, "size"),
    ],
)
def test_what_the_pipeline_does_not_take_is_refused(model: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build(model, **fields)
    assert caught.value.param == named
    build(model)


def test_videos_have_the_size_and_length_of_the_call() -> None:
    request = parse_video_request({"prompt": "a cat", "model": "ltx"})
    spec, inputs = build_video_request(request, MODELS)
    assert (spec.whole, spec.shape, inputs.fps) == (True, Shape(512, 704, 129), 25.0), "as far as the limits allow it"
    with pytest.raises(InvalidRequestError, match="1 plus a multiple of 8"):
        build_video_request(parse_video_request({"prompt": "a cat", "model": "ltx", "num_frames": 20}), MODELS)


def test_clients_are_told_what_it_lacks() -> None:
    told = MODELS["ltx"].to_json()
    assert (told["family"], told["pipeline"], told["lacks"]) == ("whole", "LTXPipeline", list(LACKS))
    assert told["output_modality"] == "video"
