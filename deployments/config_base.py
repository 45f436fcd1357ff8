"""What the sections of the configuration share: unknown keys are errors, and messages say which key is wrong."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$", max_length=96)]


class Args(BaseModel):
    """A mapping of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


def config_error(key: str, text: str) -> PydanticCustomError:
    """A problem with `key`, which is relative to the model that is being validated."""
    return PydanticCustomError("config", "{key}: {text}", {"key": key, "text": text})


def describe_problems(error: ValidationError, prefix: str) -> list[str]:
    """One line per problem, each beginning with the path of the key: `args.models[0].path: ...`."""
    lines = []
    for detail in error.errors(include_url=False, include_input=False):
        path = prefix + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"])
        text = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "config":
            key = str(detail["ctx"]["key"])
            path += key if key.startswith("[") or not key else f".{key}"
            text = str(detail["ctx"]["text"])
        elif detail["type"] == "extra_forbidden":
            text = "unknown key; check its spelling"
        lines.append(f"{path}: {text}")
    return lines
