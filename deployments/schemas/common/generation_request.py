"""The fields that the bodies of all requests share, checked one by one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from deployments.models.served import AskedQuality
from deployments.schemas.common.lora import LoraChoices, LoraField
from tridentserve.errors import InvalidRequestError
from tridentserve.requests import MAX_PRIORITY, OnLate

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
MAX_SEED = 2**63 - 1
MAX_GUIDANCE_SCALE = 100.0
MAX_FLOW_SHIFT = 100.0
MAX_SLO_MS = 86_400_000.0
MAX_PARTIAL_IMAGES = 3


# Inputs that other servers' models start from. To leave one out would make something else than was asked for.
NO_OTHER_INPUTS = dict.fromkeys(
    ("audio_reference", "conditions", "target", "video_path", "video_reference", "video_url"),
    "models here start from a text, or from a text and images",
)


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


def _read_seed(value: Any) -> Any:
    """The seed, also where a client that may send several sends one in a list."""
    match value:
        case [one]:
            return one
        case [_, *_]:
            raise PydanticCustomError(
                "seed", "must be one number, from which each output has its own noise; send a request for each seed"
            )
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
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Fields that some clients put into an object, by the name of the object."""

    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields of other kinds of requests that are taken here, and mean nothing."""

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
    seed: Annotated[int, Field(ge=0, le=MAX_SEED), BeforeValidator(_read_seed)] | None = Field(
        default=None, description="The seed. By default it is drawn, and the answer holds it."
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
    lora: LoraField | None = Field(
        default=None,
        description="The name of a LoRA of the model, or an object with `name` and `scale`. The default is none.",
    )
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
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = Field(
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
        "other servers' values `medium` counts as `high`, `low` as `fast`, `hd` and `lossless` as `exact`, and "
        "`standard` as `auto`: the model's default.",
    )
    user: PlainText | None = Field(
        default=None, description="The field is accepted because OpenAI's clients send it. It has no effect."
    )
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored(self) -> tuple[str, ...]:
        """The fields of the body that are known from other servers and have no effect here."""
        return self._ignored

    def note_ignored(self, names: Iterable[str]) -> None:
        """The body has held fields with these names, too, which have no effect here."""
        self._ignored = tuple(sorted(names))

    @property
    def num_outputs(self) -> int:
        """The number of outputs, by either of its names. Raises `InvalidRequestError` where the two differ."""
        other = self.num_outputs_per_prompt
        if other is not None and "n" in self.model_fields_set and self.n != other:
            raise InvalidRequestError("num_outputs_per_prompt: differs from n; give one of the two", "n")
        return self.n if other is None else other
