"""The body of an image request: its fields, and the check of what can be served, before anything is computed.

The parts that all requests share are here too; `video` has those of videos, `edit` those of edits.
"""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import PydanticCustomError

from deployments.models.served import AskedQuality, ServedModel
from deployments.schemas.fields import show_name
from deployments.schemas.foreign_fields import (
    FOREIGN_FIELDS,
    GRANTED_FIELDS,
    find_similar_name,
    log_ignored,
    suggest_names,
)
from deployments.schemas.lora import LoraChoices, find_uses
from deployments.schemas.model_choice import check_size, choose_model
from tridentserve.errors import InvalidRequestError
from tridentserve.requests import GenerationInputs, OnLate, RequestSpec, Shape

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
MAX_SEED = 2**63 - 1
MAX_GUIDANCE_SCALE = 100.0
MAX_FLOW_SHIFT = 100.0
MAX_SLO_MS = 86_400_000.0
MAX_PRIORITY = 1000
MAX_PARTIAL_IMAGES = 3
_TIERS = {"priority": 1, "flex": -1}
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
_RANDOM_SEEDS = 2**53  # every one of them survives a JSON parser that holds numbers as doubles


def _check_text(value: str) -> str:
    """Refuse NUL (tokenizers and C code end there) and lone surrogates (they cannot be encoded)."""
    if "\0" in value:
        raise PydanticCustomError("text", "must not hold a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "is not valid Unicode text (it holds a lone surrogate)") from None
    return value


def _check_not_blank(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("text", "must not be empty")
    return value


def _check_request_id(value: str) -> str:
    if not REQUEST_ID.fullmatch(value):
        raise PydanticCustomError(
            "text", "must be 1 to 128 letters, digits and . _ : - and begin with a letter or a digit"
        )
    return value


PlainText = Annotated[str, AfterValidator(_check_text)]


class GenerationRequest(BaseModel):
    """The fields that requests for images and for videos share. None means the default."""

    other_names: ClassVar[Mapping[str, str]] = {}
    """Fields by the names that some clients use for them."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Hints for fields that belong to other kinds of requests."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    prompt: Annotated[PlainText, AfterValidator(_check_not_blank)] = Field(description="The text to generate from.")
    model: PlainText | None = Field(
        default=None, description="The name of a served model. The default is the first one that fits the route."
    )
    n: int = Field(default=1, ge=1, description="The number of outputs.")
    num_outputs_per_prompt: int | None = Field(default=None, ge=1, description="Another name of `n`.")
    size: PlainText | None = Field(default=None, description="The size in pixels as `WxH`, or `auto` for the default.")
    width: int | None = Field(default=None, ge=1, description="The width in pixels.")
    height: int | None = Field(default=None, ge=1, description="The height in pixels.")
    num_inference_steps: int | None = Field(
        default=None, ge=1, description="The number of denoising steps. The default is the model's."
    )
    guidance_scale: float | None = Field(
        default=None, ge=0, le=MAX_GUIDANCE_SCALE, description="The guidance scale. The default is the model family's."
    )
    true_cfg_scale: float | None = Field(
        default=None,
        ge=0,
        le=MAX_GUIDANCE_SCALE,
        description="The scale of guidance by a negative prompt, as Qwen-Image's clients name it. It goes before "
        "`guidance_scale`.",
    )
    guidance_scale_2: float | None = Field(
        default=None,
        ge=0,
        le=MAX_GUIDANCE_SCALE,
        description="The guidance scale of the second of two transformers (Wan 2.2). The default is `guidance_scale`.",
    )
    flow_shift: float | None = Field(
        default=None,
        gt=0,
        le=MAX_FLOW_SHIFT,
        description="The shift of the noise levels of a video (Wan, HunyuanVideo). The default is the model's.",
    )
    negative_prompt: PlainText = Field(default="", description="The text to avoid. Some model families ignore it.")
    seed: int | None = Field(
        default=None, ge=0, le=MAX_SEED, description="The seed. By default it is drawn, and the answer holds it."
    )
    partial_images: int = Field(
        default=0,
        ge=0,
        le=MAX_PARTIAL_IMAGES,
        description="The number of previews in the stream, at steps in equal distances.",
    )
    preview_interval_ms: int | None = Field(
        default=None,
        ge=100,
        le=60_000,
        description="Milliseconds between two previews in the stream at least. The default is no previews but those of "
        "`partial_images`.",
    )
    lora: PlainText | None = Field(default=None, description="The name of a LoRA of the model. The default is none.")
    loras: LoraChoices | None = Field(
        default=None, description="Several LoRAs of the model: names, or objects with `name` and `scale`."
    )
    slo_ms: float | None = Field(
        default=None,
        gt=0,
        le=MAX_SLO_MS,
        description="Milliseconds from arrival to the deadline of the result. The default is the service's.",
    )
    on_late: OnLate = Field(
        default="wait",
        description="`refuse` answers at once with status 503, and the predicted time, if the request is predicted to "
        "end after its deadline; `degrade` makes it with fewer steps, at least half of them, if it is then in time; "
        "`wait` serves it in any case.",
    )
    priority: int = Field(
        default=0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Requests of a higher priority go first: from -5 to 5 one counts four times as much as one of the "
        "step below; beyond that it only orders video jobs that wait for the scheduler.",
    )
    service_tier: Literal["auto", "default", "flex", "priority"] = Field(
        default="auto",
        description="OpenAI's field: `priority` adds 1 to the priority, `flex` takes 1 away.",
    )
    request_id: Annotated[PlainText, AfterValidator(_check_request_id)] | None = Field(
        default=None,
        description="The id of the request. A request that asks for the same as one with this id that runs, or that "
        "completed a short while ago, joins it; one that asks for something else is refused.",
    )
    quality: AskedQuality = Field(
        default="auto",
        description="`exact`: the result that the stock pipeline would give. `high` and `fast`: denoising steps may "
        "take over what earlier ones found, `fast` more of it; the answer says how many did (`skipped_steps`). Of "
        "OpenAI's values `medium` counts as `high`, `low` as `fast`, `hd` as `exact`, and `standard` as `auto`: the "
        "model's default.",
    )
    user: PlainText | None = Field(
        default=None, description="The field is accepted because OpenAI's clients send it. It has no effect."
    )
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored(self) -> tuple[str, ...]:
        """The fields of the body that are known from other servers and have no effect here."""
        return self._ignored

    @property
    def num_outputs(self) -> int:
        """The number of outputs, by either of its names. Raises `InvalidRequestError` where the two differ."""
        other = self.num_outputs_per_prompt
        if other is not None and "n" in self.model_fields_set and self.n != other:
            raise InvalidRequestError("num_outputs_per_prompt: differs from n; give one of the two", "n")
        return self.n if other is None else other


# Values of `quality` that only DALL-E has.
DALL_E_QUALITIES = frozenset({"standard", "hd"})


class ImageRequest(GenerationRequest):
    """The body of `POST /v1/images/generations`, and the dict of the Python handle. `build_image_request` checks
    the limits that depend on the model."""

    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("image", "images", "mask", "strength", "input_reference"),
        "an image to edit goes to POST /v1/images/edits, as image",
    )

    stream: bool = Field(default=False, description="True for an answer of server-sent events.")
    response_format: Literal["b64_json", "url"] | None = Field(
        default=None,
        description="The form of the images in the answer: base64, or a data URL that holds the image itself. "
        "The default is base64, but for a `quality` that only DALL-E knows it is DALL-E's, the URL.",
    )
    output_format: Literal["png", "jpeg", "webp"] = Field(default="png", description="The format of the image files.")
    output_compression: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="The quality of JPEG and WebP files, from 0 (small) to 100. It has no effect on PNG files.",
    )
    background: Literal["auto", "opaque"] = Field(
        default="auto", description="The field is accepted because OpenAI's clients send it. It has no effect."
    )

    @property
    def wants_urls(self) -> bool:
        """True where the images of the answer are data URLs."""
        return self.response_format == "url" or self.chooses_urls

    @property
    def chooses_urls(self) -> bool:
        """True where `quality` makes the images data URLs. Clients written for DALL-E, such as LangChain's, name one of
        its qualities and count on its default."""
        return self.response_format is None and self.quality in DALL_E_QUALITIES


Parsed = TypeVar("Parsed", bound=GenerationRequest)


def parse_image_request(body: Any, lenient: bool = True) -> ImageRequest:
    """The body of an image request with `extra_body` merged in. Raises as `parse_as` does."""
    return parse_as(ImageRequest, body, lenient=lenient)


def parse_as(kind: type[Parsed], body: Any, strict: bool = True, lenient: bool = True) -> Parsed:
    """The body with `extra_body` merged in. Unless `strict`, a number may come as a text, as it does in forms. If
    `lenient`, fields of other servers are left out, and `ignored` names them.
    Raises `InvalidRequestError`, which never repeats a value of the body."""
    if not isinstance(body, Mapping):
        raise InvalidRequestError('the body must be an object of named fields, such as {"prompt": "a cat"}')
    merged = _merge_extra_body(kind, body)
    known = {*kind.model_fields, "extra_body"}
    foreign = (FOREIGN_FIELDS | GRANTED_FIELDS) - known - set(kind.elsewhere) if lenient else frozenset[str]()
    for name, value in merged.items():
        if name in known or name in foreign:
            continue
        # A client that sends null asks for nothing, unless it is a misspelt wish.
        if not lenient or value is not None or find_similar_name(str(name), known) is not None:
            raise _make_unknown_field_error(kind, name)
    fields = {name: value for name, value in merged.items() if value is not None}
    try:
        parsed = kind.model_validate({name: fields[name] for name in fields if name in known}, strict=strict)
    except ValidationError as error:
        raise _describe_first_problem(error) from None
    parsed._ignored = tuple(sorted(foreign.intersection(fields) - GRANTED_FIELDS))
    for name in parsed.ignored:
        log_ignored(name)
    return parsed


def _make_unknown_field_error(kind: type[GenerationRequest], name: object) -> InvalidRequestError:
    shown = show_name(name)
    hint = kind.elsewhere.get(name) if isinstance(name, str) else None
    hint = hint or suggest_names(shown, [*kind.model_fields, "extra_body"])
    return InvalidRequestError(f"unknown field {shown}; {hint}", shown)


def _merge_extra_body(kind: type[GenerationRequest], body: Mapping[Any, Any]) -> dict[Any, Any]:
    """The fields of the body and of its `extra_body`, by their names in the schema."""
    extra = body.get("extra_body")
    if extra is not None and not isinstance(extra, Mapping):
        raise InvalidRequestError("extra_body: must be an object of named fields", "extra_body")
    fields: dict[Any, Any] = {}
    for sent in ({name: value for name, value in body.items() if name != "extra_body"}, extra or {}):
        for name, value in sent.items():
            own = kind.other_names.get(name, name)
            if own in fields or own == "extra_body":
                shown = show_name(name)
                raise InvalidRequestError(f"{shown}: must not be given twice (see extra_body)", shown)
            fields[own] = value
    return fields


def _describe_first_problem(error: ValidationError) -> InvalidRequestError:
    detail = error.errors(include_url=False, include_input=False, include_context=False)[0]
    name = str(detail["loc"][0])
    message = "is required" if detail["type"] == "missing" else detail["msg"]
    return InvalidRequestError(f"{name}: {message}", name)


def build_image_request(
    body: Mapping[str, Any] | ImageRequest, models: Mapping[str, ServedModel]
) -> tuple[RequestSpec, GenerationInputs]:
    """The request as the scheduler and workers get it. The default model is the first of `models` that makes images.

    Raises `InvalidRequestError`, or its subclass `UnknownModelError`.
    """
    request = body if isinstance(body, ImageRequest) else parse_image_request(body)
    model = choose_model(request.model, models, videos=False)
    check_limits(request, model)
    width, height, param = resolve_size(request, Shape(model.default_side, model.default_side))
    check_size(width, height, param, model)
    spec, inputs = build_request(request, model, Shape(height=height, width=width), make_image_id())
    return spec, add_file_format(inputs, request)


def add_file_format(inputs: GenerationInputs, request: ImageRequest) -> GenerationInputs:
    """The inputs with the format of the files that are asked for."""
    return replace(inputs, output_format=request.output_format, compression=request.output_compression)


def make_image_id() -> str:
    return f"img-{uuid.uuid4().hex}"


def build_request(
    request: GenerationRequest, model: ServedModel, shape: Shape, new_id: str
) -> tuple[RequestSpec, GenerationInputs]:
    """A checked request as the scheduler and workers get it. `new_id` is its id unless it has its own."""
    steps = request.num_inference_steps or model.default_steps
    guidance_scale, own, interval_ms = request.guidance_scale, model.own_fields, request.preview_interval_ms
    if "true_cfg_scale" in own and request.true_cfg_scale is not None:
        guidance_scale = request.true_cfg_scale
    quality, loras = model.choose_quality(request.quality), find_uses(request.lora, request.loras, model)
    spec = RequestSpec(
        request_id=request.request_id or new_id,
        model=model.name,
        shape=shape,
        num_inference_steps=steps,
        num_outputs=request.num_outputs,
        slo_s=None if request.slo_ms is None else request.slo_ms / 1000,
        loras=tuple(use.file.key for use in loras),
        priority=request.priority + _TIERS.get(request.service_tier, 0),
        on_late=request.on_late,
        quality=quality,
        cheaper_quality="fast" if model.caches_steps else None,
        whole=model.family.whole,
    )
    inputs = GenerationInputs(
        prompt=request.prompt,
        shape=shape,
        num_inference_steps=steps,
        guidance_scale=model.default_guidance_scale if guidance_scale is None else guidance_scale,
        seed=secrets.randbelow(_RANDOM_SEEDS) if request.seed is None else request.seed,
        negative_prompt=request.negative_prompt,
        num_outputs=request.num_outputs,
        loras=loras,
        guidance_scale_2=request.guidance_scale_2 if "guidance_scale_2" in own else None,
        flow_shift=request.flow_shift if "flow_shift" in own else None,
        quality=quality,
        partial_images=0 if model.family.whole else request.partial_images,
        preview_interval_s=None if model.family.whole or interval_ms is None else interval_ms / 1000,
        seed_drawn=request.seed is None,
        id_drawn=request.request_id is None,
    )
    return spec, inputs


def check_limits(request: GenerationRequest, model: ServedModel) -> None:
    """Check the outputs, steps, texts and LoRAs of a request. Raises `InvalidRequestError`."""
    limits = model.limits
    _check_at_most("n", request.num_outputs, limits.max_outputs)
    _check_at_most("num_inference_steps", request.num_inference_steps or 1, limits.max_steps)
    for name, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt)):
        if len(text) > limits.max_prompt_chars:
            raise InvalidRequestError(f"{name}: has more than {limits.max_prompt_chars} characters", name)
    asked = {
        "negative_prompt": bool(request.negative_prompt),
        "guidance_scale": request.guidance_scale is not None,
        "n": request.num_outputs > 1,
    }
    for name in sorted(model.family.absent_fields):
        if asked[name]:
            raise InvalidRequestError(f"{name}: the pipeline of this model does not take it", name)
    find_uses(request.lora, request.loras, model)


def _check_at_most(name: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidRequestError(f"{name}: must be at most {limit} for this model", name)


def resolve_size(request: GenerationRequest, default: Shape) -> tuple[int, int, str]:
    """The requested width and height, and the field that determines them. `size` and the other two may both be given
    when they agree. Raises `InvalidRequestError`."""
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
