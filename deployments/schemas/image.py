"""The body of an image request: which fields there are, and what of them can be served. Nothing is made before.

What all requests share is here too; `video_schemas` has what only videos have, `edit_schemas` what edits have.
"""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from deployments.http.forms import shown_name
from deployments.models.served import ServedModel
from tridentserve.errors import InvalidRequestError, UnknownModelError
from tridentserve.requests import GenerationInputs, RequestSpec, Shape

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
MAX_SEED = 2**63 - 1
MAX_GUIDANCE_SCALE = 100.0
MAX_SLO_MS = 86_400_000.0
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
_RANDOM_SEEDS = 2**53  # every one of them survives a JSON parser that holds numbers as doubles


def _text(value: str) -> str:
    """No NUL (tokenizers and C code end there) and no lone surrogate (it cannot be encoded)."""
    if "\0" in value:
        raise PydanticCustomError("text", "must not hold a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "is not valid Unicode text (it holds a lone surrogate)") from None
    return value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("text", "must not be empty")
    return value


def _request_id(value: str) -> str:
    if not REQUEST_ID.fullmatch(value):
        raise PydanticCustomError(
            "text", "must be 1 to 128 letters, digits and . _ : - and begin with a letter or a digit"
        )
    return value


def _response_format(value: str) -> str:
    if value == "url":
        raise PydanticCustomError("text", "'url' is not supported, nothing is stored; use 'b64_json'")
    if value != "b64_json":
        raise PydanticCustomError("text", "must be 'b64_json'")
    return value


Text = Annotated[str, AfterValidator(_text)]


class GenerationRequest(BaseModel):
    """The fields that requests of pictures and of videos share. None means the default.

    `other_names`: what some clients call a field. `elsewhere`: what is to be done with fields of other requests."""

    other_names: ClassVar[Mapping[str, str]] = {}
    elsewhere: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    prompt: Annotated[Text, AfterValidator(_not_blank)]
    model: Text | None = None
    n: int = Field(default=1, ge=1)
    size: Text | None = Field(default=None, description="`WxH` or `auto`")
    width: int | None = Field(default=None, ge=1)
    height: int | None = Field(default=None, ge=1)
    num_inference_steps: int | None = Field(default=None, ge=1)
    guidance_scale: float | None = Field(default=None, ge=0, le=MAX_GUIDANCE_SCALE)
    negative_prompt: Text = ""
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="None: a random one, told in the answer")
    lora: Text | None = Field(default=None, description="one of the model's LoRAs; None: the model as it is")
    slo_ms: float | None = Field(
        default=None, gt=0, le=MAX_SLO_MS, description="from arrival to answer; None: the service's"
    )
    request_id: Annotated[Text, AfterValidator(_request_id)] | None = Field(
        default=None, description="the same id joins the running or finished request"
    )
    quality: Literal["auto", "standard"] = "auto"
    user: Text | None = None


class ImageRequest(GenerationRequest):
    """The body of `POST /v1/images/generations`, and the dict of the Python handle.

    Limits that depend on the model are checked by `to_request`. `quality`, `background`, `output_format` and `user`
    are what OpenAI's clients may send: accepted where they ask for what is served anyhow, without effect.
    """

    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("image", "images", "mask", "input_reference"),
        "a picture to edit goes to POST /v1/images/edits, as image",
    )

    stream: bool = False
    response_format: Annotated[Text, AfterValidator(_response_format)] = "b64_json"
    output_format: Literal["png"] = "png"
    background: Literal["auto", "opaque"] = "auto"


Parsed = TypeVar("Parsed", bound=GenerationRequest)


def parse_request(body: Any) -> ImageRequest:
    """The body of an image request with `extra_body` merged in. Raises as `parse_as` does."""
    return parse_as(ImageRequest, body)


def parse_as(kind: type[Parsed], body: Any, strict: bool = True) -> Parsed:
    """The body with `extra_body` merged in. Unless `strict`, a number may come as a text, as it does in forms.
    Raises `InvalidRequestError`, which never repeats a value of the body."""
    if not isinstance(body, Mapping):
        raise InvalidRequestError('the body must be an object of named fields, such as {"prompt": "a cat"}')
    fields = _merged(kind, body)
    for name in fields:
        if name not in kind.model_fields:
            known = "there are " + ", ".join(sorted([*kind.model_fields, "extra_body"]))
            hint = kind.elsewhere.get(name, known) if isinstance(name, str) else known
            raise InvalidRequestError(f"unknown field {shown_name(name)}; {hint}", shown_name(name))
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value is not None}, strict=strict)
    except ValidationError as error:
        raise _first_problem(error) from None


def _merged(kind: type[GenerationRequest], body: Mapping[Any, Any]) -> dict[Any, Any]:
    """The fields of the body and of its `extra_body`, by the names that they have here."""
    extra = body.get("extra_body")
    if extra is not None and not isinstance(extra, Mapping):
        raise InvalidRequestError("extra_body: must be an object of named fields", "extra_body")
    fields: dict[Any, Any] = {}
    for sent in ({name: value for name, value in body.items() if name != "extra_body"}, extra or {}):
        for name, value in sent.items():
            own = kind.other_names.get(name, name)
            if own in fields or own == "extra_body":
                shown = shown_name(name)
                raise InvalidRequestError(f"{shown}: must not be given twice (see extra_body)", shown)
            fields[own] = value
    return fields


def _first_problem(error: ValidationError) -> InvalidRequestError:
    detail = error.errors(include_url=False, include_input=False, include_context=False)[0]
    name = str(detail["loc"][0])
    message = "is required" if detail["type"] == "missing" else detail["msg"]
    return InvalidRequestError(f"{name}: {message}", name)


def to_request(
    body: Mapping[str, Any] | ImageRequest, models: Mapping[str, ServedModel]
) -> tuple[RequestSpec, GenerationInputs]:
    """What the scheduler and the workers get of a body. The first model of `models` that makes pictures is the default.

    Raises `InvalidRequestError`, or its subclass `UnknownModelError`.
    """
    request = body if isinstance(body, ImageRequest) else parse_request(body)
    model = model_of(request.model, models, videos=False)
    check_limits(request, model)
    width, height, param = asked_size(request, Shape(model.default_side, model.default_side))
    check_size(width, height, param, model)
    return made(request, model, Shape(height=height, width=width), new_image_id())


def new_image_id() -> str:
    return f"img-{uuid.uuid4().hex}"


def made(
    request: GenerationRequest, model: ServedModel, shape: Shape, new_id: str
) -> tuple[RequestSpec, GenerationInputs]:
    """A checked request as the scheduler and the workers take it. `new_id`: unless it brings its own."""
    steps = request.num_inference_steps or model.default_steps
    guidance_scale = request.guidance_scale
    spec = RequestSpec(
        request_id=request.request_id or new_id,
        model=model.name,
        shape=shape,
        num_inference_steps=steps,
        num_outputs=request.n,
        slo_s=None if request.slo_ms is None else request.slo_ms / 1000,
        lora=request.lora,
    )
    inputs = GenerationInputs(
        prompt=request.prompt,
        shape=shape,
        num_inference_steps=steps,
        guidance_scale=model.family.default_guidance_scale if guidance_scale is None else guidance_scale,
        seed=secrets.randbelow(_RANDOM_SEEDS) if request.seed is None else request.seed,
        negative_prompt=request.negative_prompt,
        num_outputs=request.n,
        lora=request.lora,
        seed_drawn=request.seed is None,
    )
    return spec, inputs


def model_of(
    name: str | None, models: Mapping[str, ServedModel], videos: bool, from_picture: bool = False
) -> ServedModel:
    """The model of this name, or the first one that makes videos (or pictures). Those that make pictures from a
    picture, and those that make them without, have routes of their own. Raises `UnknownModelError`."""
    kind = _kind_of(videos, from_picture)
    fitting = {key: model for key, model in models.items() if _kind_of(model.makes_videos, model.takes_image) == kind}
    if name is not None and name in models and name not in fitting:
        other = _kind_of(models[name].makes_videos, models[name].takes_image)
        raise UnknownModelError(f"model: this one {other}; send the request to {_ROUTES[other]}", "model")
    if not fitting:
        raise UnknownModelError(f"model: none of the served models {kind}", "model")
    if name is not None and name not in fitting:
        raise not_served(fitting)
    if name is not None:
        return fitting[name]
    return next(
        (model for model in fitting.values() if model.takes_image == from_picture), next(iter(fitting.values()))
    )


def not_served(served: Iterable[str]) -> UnknownModelError:
    there = f"there are {names}" if (names := ", ".join(served)) else "no model is, at the moment"
    return UnknownModelError(f"model: this model is not served; {there}", "model")


_ROUTES = {
    "makes pictures": "/v1/images/generations",
    "edits pictures": "/v1/images/edits",
    "makes videos": "/v1/videos",
}


def _kind_of(videos: bool, from_picture: bool) -> str:
    """What a model does, a key of `_ROUTES`."""
    return "makes videos" if videos else "edits pictures" if from_picture else "makes pictures"


def check_limits(request: GenerationRequest, model: ServedModel) -> None:
    """Outputs, steps, texts and the LoRA. Raises `InvalidRequestError`."""
    limits = model.limits
    _at_most("n", request.n, limits.max_outputs)
    _at_most("num_inference_steps", request.num_inference_steps or 1, limits.max_steps)
    for name, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt)):
        if len(text) > limits.max_prompt_chars:
            raise InvalidRequestError(f"{name}: has more than {limits.max_prompt_chars} characters", name)
    if request.lora is not None and request.lora not in model.loras:
        there = ", ".join(model.loras) or "none"
        raise InvalidRequestError(f"lora: this model has no LoRA of this name (there are: {there})", "lora")


def _at_most(name: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidRequestError(f"{name}: must be at most {limit} for this model", name)


def check_size(width: int, height: int, param: str, model: ServedModel) -> None:
    """Whether the model can make this size, for which the field `param` is to blame. Raises `InvalidRequestError`."""
    limits, multiple = model.limits, model.family.size_multiple
    if width % multiple or height % multiple:
        raise InvalidRequestError(f"{param}: width and height must be multiples of {multiple} for this model", param)
    if min(width, height) < limits.min_side or max(width, height) > limits.max_side:
        raise InvalidRequestError(
            f"{param}: width and height must be {limits.min_side} to {limits.max_side} for this model", param
        )
    if width * height > limits.max_pixels:
        raise InvalidRequestError(
            f"{param}: width times height must be at most {limits.max_pixels} pixels for this model",
            param,
        )


def asked_size(request: GenerationRequest, default: Shape) -> tuple[int, int, str]:
    """Width, height and the field that is to blame for them. Both forms may be given when they agree.
    Raises `InvalidRequestError`."""
    if (request.width is None) != (request.height is None):
        missing = "width" if request.width is None else "height"
        raise InvalidRequestError(f"{missing}: give both width and height, or size", missing)
    asked = None if request.width is None or request.height is None else (request.width, request.height)
    if request.size is None or request.size == "auto":
        width, height = asked or (default.width, default.height)
        param = "size" if asked is None else "width"
        return width, height, param
    match = _SIZE.fullmatch(request.size)
    if match is None:
        raise InvalidRequestError("size: must be `WxH` in pixels, such as 512x512, or `auto`", "size")
    size = (int(match[1]), int(match[2]))
    if asked is not None and asked != size:
        raise InvalidRequestError("size: differs from width and height; give one of the two forms", "size")
    return *size, "size"
