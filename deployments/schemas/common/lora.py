"""The LoRAs of a request, and the body with which a LoRA is added."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from deployments.models.served import ServedModel
from deployments.schemas.common.fields import read_json_text, show_name
from tridentserve.errors import InvalidRequestError, LoraNotFoundError
from tridentserve.models.lora_files import LoraFile, LoraUse

MAX_LORAS = 8
MAX_LORA_SCALE = 10.0
_OTHER_NAMES = {
    "lora_name": "name",
    "adapter": "name",
    "lora_path": "path",
    "local_path": "path",
    "lora_scale": "scale",
    "lora_int_id": "int_id",
}
LORA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class LoraChoice(BaseModel):
    """A LoRA that a request asks for."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    name: str = Field(description="The name of a LoRA of the model.")
    scale: float = Field(
        default=1.0, ge=-MAX_LORA_SCALE, le=MAX_LORA_SCALE, description="The factor of its changes, beside the file's."
    )
    path: str | None = Field(default=None, description="vLLM-Omni's field, without effect: LoRAs are added by name.")
    int_id: int | None = Field(default=None, description="vLLM-Omni's field, without effect.")

    def list_ignored(self) -> list[str]:
        """The fields that were given a value, and have no effect."""
        return [f"lora.{name}" for name in ("path", "int_id") if getattr(self, name) is not None]


def _read_text(value: Any) -> Any:
    """A form has texts only: a list is JSON there, and any other text is one name."""
    read = read_json_text(value)
    return [read] if isinstance(read, str) and not read.lstrip().startswith("[") else read


def _read_choice(value: Any) -> Any:
    """One LoRA: its name, or an object with the names that vLLM-Omni's clients use."""
    value = read_json_text(value)
    if not isinstance(value, Mapping):
        return value
    fields = {_OTHER_NAMES.get(name, name): given for name, given in value.items() if given is not None}
    if not isinstance(fields.get("name"), str):
        raise PydanticCustomError(
            "lora",
            "an object must have the name of a LoRA of the model, as GET /v1/models lists them; none is read "
            "from a path of the request's",
        )
    if unknown := fields.keys() - LoraChoice.model_fields.keys():
        raise PydanticCustomError("lora", "an object has no field {name}", {"name": show_name(min(unknown, key=str))})
    return fields


LoraField = Annotated[str | LoraChoice, BeforeValidator(_read_choice)]
LoraChoices = Annotated[list[str | LoraChoice], Field(max_length=MAX_LORAS), BeforeValidator(_read_text)]


class NewLora(BaseModel):
    """The body of `POST /v1/models/{model}/loras`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = Field(description="The name by which requests will ask for it.", pattern=f"^{LORA_NAME.pattern}$")
    path: str = Field(
        description="A safetensors file, or a directory with one, at the same absolute path on all nodes.",
        min_length=1,
        max_length=4096,
        pattern=r"^[^\x00]*$",
    )


def parse_new_lora(body: Any) -> NewLora:
    """Raises `InvalidRequestError`, which never repeats a value of the body."""
    try:
        return NewLora.model_validate(body)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = show_name(detail["loc"][0]) if detail["loc"] else "body"
        raise InvalidRequestError(f"{name}: {detail['msg']}", name) from None


def find_uses(
    lora: str | LoraChoice | None, loras: Sequence[str | LoraChoice] | None, model: ServedModel
) -> tuple[LoraUse, ...]:
    """The LoRAs of a request by its fields `lora` and `loras`. Raises `InvalidRequestError`."""
    if lora is not None and loras is not None:
        raise InvalidRequestError("lora: give lora or loras, not both", "lora")
    param = "lora" if loras is None else "loras"
    named: Sequence[str | LoraChoice] = loras if loras is not None else [] if lora is None else [lora]
    choices = [LoraChoice(name=choice) if isinstance(choice, str) else choice for choice in named]
    if any(count > 1 for count in Counter(choice.name for choice in choices).values()):
        raise InvalidRequestError(f"{param}: names a LoRA twice", param)
    return tuple(LoraUse(_find_named(choice.name, model, param), choice.scale) for choice in choices)


def _find_named(name: str, model: ServedModel, param: str) -> LoraFile:
    if (found := model.find_lora(name)) is None:
        there = ", ".join(lora.name for lora in model.loras) or "none"
        raise InvalidRequestError(f"{param}: this model has no LoRA of this name (there are: {there})", param)
    return found


def require_lora(model: ServedModel, name: str) -> LoraFile:
    """The LoRA of this name. Raises `LoraNotFoundError`."""
    if (found := model.find_lora(name)) is None:
        raise LoraNotFoundError("this model has no LoRA of this name")
    return found
