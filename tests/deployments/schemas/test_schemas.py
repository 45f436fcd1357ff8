"""Bodies become requests, or are refused before anything is computed, with the field's name and without its value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deployments.schemas.common.generation_request import MAX_SEED
from deployments.schemas.image import build_image_request, parse_image_request
from tests.deployments.fake_backend import LIMITS, MODELS
from tridentserve.errors import InvalidRequestError, UnknownModelError
from tridentserve.models.lora_files import LoraUse
from tridentserve.requests import GenerationInputs, RequestSpec, Shape

CANARY = "canary-7f3a"
INK, PASTEL = MODELS["tiny-flux"].loras


def accept(**fields: Any) -> tuple[RequestSpec, GenerationInputs]:
    return build_image_request({"prompt": "a cat", **fields}, MODELS)


def refuse(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        accept(**fields)
    assert CANARY not in str(caught.value)
    return caught.value


def test_defaults_are_those_of_the_first_model() -> None:
    spec, inputs = accept()
    assert spec.model == "tiny-sd3"
    assert spec.shape == inputs.shape == Shape(208, 208)  # the largest square of 192 x 256 pixels
    assert spec.num_inference_steps == inputs.num_inference_steps == 28
    assert inputs.guidance_scale == 7.0
    assert spec.num_outputs == inputs.num_outputs == 1
    assert spec.slo_s is None
    assert inputs.negative_prompt == ""
    assert 0 <= inputs.seed < 2**53
    other, other_inputs = accept()
    assert other.request_id != spec.request_id
    assert other_inputs.seed != inputs.seed


def test_defaults_are_those_of_the_named_model() -> None:
    spec, inputs = accept(model="tiny-flux")
    assert (spec.model, spec.shape, inputs.guidance_scale) == ("tiny-flux", Shape(1024, 1024), 3.5)


def test_all_fields_arrive() -> None:
    spec, inputs = accept(
        n=2,
        size="64x128",
        num_inference_steps=4,
        guidance_scale=0,
        negative_prompt="blurry",
        seed=0,
        slo_ms=1500,
        request_id="job:1.a_b-c",
        user="somebody",
        quality="standard",
        output_format="png",
        background="opaque",
    )
    shape = Shape(height=128, width=64)
    assert spec == RequestSpec("job:1.a_b-c", "tiny-sd3", shape, 4, 2, 1.5, cheaper_quality="fast")
    assert inputs == GenerationInputs("a cat", Shape(128, 64), 4, 0.0, 0, "blurry", 2)


def test_a_lora_is_one_of_the_models() -> None:
    spec, inputs = accept(model="tiny-flux", lora="ink")
    assert (spec.loras, inputs.loras) == (("tiny-flux:ink",), (LoraUse(INK),))
    assert accept(model="tiny-flux", lora=None)[0].loras == ()
    for name in (CANARY, "../ink", ""):
        error = refuse(model="tiny-flux", lora=name)
        assert (error.param, "there are: ink, pastel" in str(error)) == ("lora", True)
    assert "there are: none" in str(refuse(lora="ink"))


@pytest.mark.parametrize(
    "loras",
    [["pastel", {"name": "ink", "scale": -0.5}], '["pastel", {"name": "ink", "scale": -0.5}]'],
    ids=["a list", "JSON, as in a form"],
)
def test_several_loras_have_scales_and_an_order(loras: Any) -> None:
    spec, inputs = accept(model="tiny-flux", loras=loras)
    assert spec.loras == ("tiny-flux:pastel", "tiny-flux:ink")
    assert inputs.loras == (LoraUse(PASTEL), LoraUse(INK, -0.5))
    assert accept(model="tiny-flux", loras="ink")[1].loras == (LoraUse(INK),)
    assert accept(model="tiny-flux", loras=[])[1].loras == ()


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"loras": ["ink", "ink"]}, "loras", "twice"),
        ({"loras": ["ink", CANARY]}, "loras", "there are: ink, pastel"),
        ({"loras": [{"name": "ink", "scale": 11}]}, "loras", ""),
        ({"loras": [{"name": "ink", "weight": 1}]}, "loras", ""),
        ({"loras": [f"a{i}" for i in range(9)]}, "loras", "8"),
        ({"loras": "[" * 5000}, "loras", ""),
        ({"lora": "ink", "loras": ["pastel"]}, "lora", "not both"),
    ],
)
def test_odd_loras_are_refused(fields: dict[str, Any], param: str, said: str) -> None:
    error = refuse(model="tiny-flux", **fields)
    assert error.param == param
    assert said in str(error)


def test_extra_body_counts_like_the_top_level() -> None:
    spec, inputs = accept(extra_body={"width": 64, "height": 32, "seed": 5, "slo_ms": None})
    assert (spec.shape, inputs.seed, spec.slo_s) == (Shape(32, 64), 5, None)


def test_null_means_default() -> None:
    assert accept(size=None, seed=None, n=None, extra_body=None, stream=None)[0].num_outputs == 1


def test_both_forms_of_a_size_may_be_given_when_they_agree() -> None:
    assert accept(size="64x32", width=64, height=32)[0].shape == Shape(32, 64)
    assert accept(size="auto", width=64, height=32)[0].shape == Shape(32, 64)
    assert refuse(size="64x32", width=64, height=64).param == "size"


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("n", [1, LIMITS.max_outputs - 1, LIMITS.max_outputs], [0, -1, LIMITS.max_outputs + 1, 10**400]),
        ("num_inference_steps", [1, LIMITS.max_steps - 1, LIMITS.max_steps], [0, LIMITS.max_steps + 1, 2**63]),
        ("prompt", ["x" * (LIMITS.max_prompt_chars - 1), "x" * LIMITS.max_prompt_chars], ["x" * 201, "", " \n\t"]),
        ("negative_prompt", ["", "x" * LIMITS.max_prompt_chars], ["x" * (LIMITS.max_prompt_chars + 1)]),
        ("seed", [0, 1, MAX_SEED - 1, MAX_SEED], [-1, MAX_SEED + 1]),
        ("guidance_scale", [0, 0.5, 100], [-0.1, 100.1, math.nan, math.inf, 10**400]),
        ("slo_ms", [0.001, 86_400_000], [0, -1, 86_400_001, math.nan, -math.inf]),
        ("request_id", ["a", "a" * 128, "0.1:2_3-4"], ["", "a" * 129, ".a", "a/b", "a b", "a\n", "ä"]),
        ("size", ["32x32", "256x192", "192x256", "auto"], ["256x208", "16x64", "272x32", "40x64", "64x40"]),
    ],
)
def test_limits(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        accept(**{field: value})
    for value in bad:
        error = refuse(**{field: value})
        assert error.param == field, value
        assert error.http_status == 422


@pytest.mark.parametrize(
    "size",
    ["", "64", "x", "64x", "64x64x64", "064x64", "64X64", " 64x64", "64x64\n", "-64x64", "6.4x64", "٦٤x٦٤", "9" * 5000],
)
def test_sizes_that_are_none(size: str) -> None:
    assert refuse(size=size).param == "size"


@pytest.mark.parametrize(("field", "missing"), [("width", "height"), ("height", "width")])
def test_half_a_size_is_none(field: str, missing: str) -> None:
    assert refuse(**{field: 64}).param == missing


@pytest.mark.parametrize(
    "changes",
    [
        {"n": True},
        {"n": 1.0},
        {"n": "1"},
        {"seed": False},
        {"seed": 1.5},
        {"num_inference_steps": [4]},
        {"guidance_scale": True},
        {"guidance_scale": "7"},
        {"prompt": 3},
        {"prompt": [CANARY]},
        {"prompt": None},
        {"model": 3},
        {"stream": 1},
        {"stream": "true"},
        {"size": 64},
        {"width": "64", "height": 64},
        {"slo_ms": "fast"},
        {"request_id": 7},
        {"quality": "ultra"},
        {"background": "transparent"},
        {"output_format": "gif"},
        {"output_compression": 101},
        {"response_format": CANARY},
        {"user": {}},
        {"extra_body": CANARY},
        {"extra_body": [1]},
    ],
)
def test_wrong_types_and_unsupported_values(changes: dict[str, Any]) -> None:
    assert refuse(**changes).param == next(iter(changes))


@pytest.mark.parametrize("text", [f"{CANARY}\0", f"{CANARY}\ud800", f"\udfff{CANARY}"])
@pytest.mark.parametrize("field", ["prompt", "negative_prompt", "model", "size", "request_id", "user"])
def test_text_that_cannot_be_text(field: str, text: str) -> None:
    assert refuse(**{field: text}).param == field


@pytest.mark.parametrize("name", ["steps", "colour", "", "__class__", "a" * 500, "\0", "\ud800", "ключ"])
def test_unknown_fields_are_named(name: str) -> None:
    for error in (refuse(**{name: CANARY}), refuse(extra_body={name: CANARY})):
        assert error.param is not None
        assert error.param.isascii()
        assert len(error.param) <= 67
        assert error.param.isascii()
        assert len(error.param) <= 67
        assert "unknown field" in str(error)
        assert "num_inference_steps" in str(error)
    assert refuse(steps=4).param == "steps"


def test_keys_that_are_no_text() -> None:
    with pytest.raises(InvalidRequestError, match="unknown field"):
        parse_image_request({"prompt": "x", 3: CANARY})


@pytest.mark.parametrize("extra", [{"prompt": "x"}, {"extra_body": {}}])
def test_a_field_is_given_once(extra: dict[str, Any]) -> None:
    assert refuse(extra_body=extra).param == next(iter(extra))


@pytest.mark.parametrize("body", [None, [], "prompt", 3, True])
def test_a_body_is_an_object(body: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be an object"):
        parse_image_request(body)


def test_the_prompt_is_required() -> None:
    with pytest.raises(InvalidRequestError, match="prompt: is required"):
        parse_image_request({})


@pytest.mark.parametrize(
    "model", ["", "gpt-image-1", "../tiny-sd3", "/etc/passwd", "%2e%2e/x", "tiny-sd3/", "TINY-SD3", "．．／tiny-sd3"]
)
def test_unknown_models(model: str) -> None:
    with pytest.raises(UnknownModelError, match="tiny-sd3, tiny-flux") as caught:
        accept(model=model)
    assert (caught.value.param, caught.value.code, caught.value.http_status) == ("model", "model_not_found", 404)
