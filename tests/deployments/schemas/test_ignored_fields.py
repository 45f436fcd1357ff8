"""Fields that have a meaning for some models: those get them, and the answers of the others name them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.config.models import ModelArgs, RequestDefaults
from deployments.models.served import ServedModel, build_served_model
from deployments.schemas.common.generation_request import GenerationRequest
from deployments.schemas.common.ignored_fields import list_ignored
from deployments.schemas.image import build_image_request, parse_image_request
from deployments.schemas.video import build_video_request, parse_video_request
from tests.deployments.fake_backend import VIDEO_LIMITS, WITH_VIDEOS
from tests.pipelines.models import model_folder
from tridentserve.errors import InvalidRequestError
from tridentserve.models.families import FAMILIES
from tridentserve.requests import GenerationInputs

QWEN = ServedModel("tiny-qwen", FAMILIES["qwen_image"], VIDEO_LIMITS)
MODELS = WITH_VIDEOS | {
    "tiny-qwen": QWEN,
    "wan-2.2": replace(WITH_VIDEOS["tiny-wan"], name="wan-2.2", has_two_experts=True),
}
ALL = {"true_cfg_scale": 2.5, "guidance_scale_2": 1.5, "flow_shift": 9}


def ask(model: str, **fields: Any) -> tuple[GenerationInputs, tuple[str, ...]]:
    body = {"prompt": "a cat", "model": model, **fields}
    request: GenerationRequest
    if MODELS[model].makes_videos:
        request = parse_video_request(body)
        _, inputs = build_video_request(request, MODELS)
    else:
        request = parse_image_request(body)
        _, inputs = build_image_request(request, MODELS)
    return inputs, list_ignored(request, MODELS[model], streams=False)


@pytest.mark.parametrize(
    ("model", "held"),
    [
        ("tiny-sd3", set()),
        ("tiny-flux", set()),
        ("tiny-qwen", {"true_cfg_scale"}),
        ("tiny-wan", {"flow_shift"}),
        ("wan-2.2", {"flow_shift", "guidance_scale_2"}),
    ],
)
def test_a_field_holds_or_is_named(model: str, held: set[str]) -> None:
    inputs, ignored = ask(model, **ALL, guidance_scale=6.0)
    assert set(ignored) == set(ALL) - held
    assert inputs.guidance_scale == (2.5 if "true_cfg_scale" in held else 6.0)
    assert inputs.guidance_scale_2 == (1.5 if "guidance_scale_2" in held else None)
    assert inputs.flow_shift == (9.0 if "flow_shift" in held else None)
    assert ask(model, **dict.fromkeys(ALL))[1] == (), "a client that sends null asks for nothing"


@pytest.mark.parametrize("model", ["tiny-sd3", "wan-2.2"])
@pytest.mark.parametrize(
    ("name", "values", "range_of"),
    [
        ("true_cfg_scale", (-0.1, 100.5), ("greater than or equal to 0", "less than or equal to 100")),
        ("guidance_scale_2", (-0.1, 100.5), ("greater than or equal to 0", "less than or equal to 100")),
        ("flow_shift", (0, 100.5), ("greater than 0", "less than or equal to 100")),
    ],
)
def test_a_value_out_of_range_is_refused_for_every_model(
    model: str, name: str, values: tuple[float, ...], range_of: tuple[str, ...]
) -> None:
    for value, allowed in zip(values, range_of, strict=True):
        with pytest.raises(InvalidRequestError, match=f"{name}: Input should be {allowed}") as caught:
            ask(model, **{name: value})
        assert caught.value.param == name


@pytest.mark.parametrize(("variant", "has_two"), [("wan", False), ("wan-2.2", True)])
def test_the_folder_says_if_a_model_has_two_experts(tmp_path: Path, variant: str, has_two: bool) -> None:
    model = build_served_model(ModelArgs(name="m", path=model_folder(variant, tmp_path)))
    assert ("guidance_scale_2" in model.own_fields) == has_two
    assert "flow_shift" in model.own_fields


@pytest.mark.parametrize(
    ("sent", "made"),
    [
        ("auto", "high"),
        ("standard", "high"),
        ("exact", "exact"),
        ("hd", "exact"),
        ("high", "high"),
        ("medium", "high"),
        ("fast", "fast"),
        ("low", "fast"),
    ],
)
def test_a_quality_is_made_or_named(sent: str, made: str) -> None:
    defaults = RequestDefaults(quality="high")
    models = {name: replace(model, defaults=defaults) for name, model in MODELS.items()}
    request = parse_image_request({"prompt": "a cat", "quality": sent, "response_format": "b64_json"})
    spec, inputs = build_image_request(request, models)
    assert (spec.quality, inputs.quality, spec.cheaper_quality) == (made, made, "fast")
    is_named = sent == "standard"
    assert list_ignored(request, models[spec.model], streams=False) == (("quality",) if is_named else ())
    video = parse_video_request({"prompt": "a cat", "model": "wan-2.2", "quality": sent})
    spec, inputs = build_video_request(video, models)
    assert (spec.quality, inputs.quality, spec.cheaper_quality) == ("exact", "exact", None)
    is_named = sent not in ("auto", "exact")
    assert list_ignored(video, models["wan-2.2"], streams=False) == (("quality",) if is_named else ())
