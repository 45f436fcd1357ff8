"""What the sections of the configuration share: unknown keys are errors, and messages say which key is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from tridentserve.validation import problem_text

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$", max_length=96)]


class Args(BaseModel):
    """A mapping of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


def config_error(key: str, text: str) -> PydanticCustomError:
    """A problem with `key`, which is relative to the model that is being validated."""
    return PydanticCustomError("config", "{key}: {text}", {"key": key, "text": text})


def absolute(path: Path) -> Path:
    """`~` replaced, and not relative: the replicas of Ray Serve run in folders of their own."""
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise config_error("", f"{path.parts[0]} is no user with a home folder here; write the whole path") from None


LocalPath = Annotated[Path, AfterValidator(absolute)]


def describe_problems(error: ValidationError, prefix: str) -> list[str]:
    """One line per problem, each beginning with the path of the key: `args.models[0].path: ...`."""
    lines = []
    for detail in error.errors(include_url=False, include_input=False):
        path = prefix + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"])
        text = problem_text(detail)
        if detail["type"] == "config":
            key = str(detail["ctx"]["key"])
            path += key if key.startswith("[") or not key else f".{key}"
            text = str(detail["ctx"]["text"])
        lines.append(f"{path}: {text}")
    return lines
