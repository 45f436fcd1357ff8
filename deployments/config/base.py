"""The common base of the configuration's sections: unknown keys are errors, and messages say which key is wrong.

A key that an option dataclass of another package holds is declared with `make_option`: default, checks and
description are that field's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from tridentserve.byte_sizes import MIB
from tridentserve.validation import describe_problem

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$", max_length=96)]
# Units of keys, in those of the fields that they stand for.
MILLISECONDS = Fraction(1, 1000)
MEBIBYTES = Fraction(MIB)


class Args(BaseModel):
    """A mapping of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True, slots=True)
class OptionOf:
    """Marks a key of the configuration that stands for a field of an option dataclass."""

    owner: type
    name: str
    unit: Fraction
    """One unit of the key, in units of the field."""

    def to_field(self, given: Any) -> Any:
        """A value of the key, in units of the field."""
        return given if self.unit == 1 else _multiply(given, self.unit)

    def make_default(self) -> Any:
        """The field's default, in units of the key."""
        default = _get_fields(self.owner)[self.name].default
        return default if self.unit == 1 else _multiply(default, 1 / self.unit)


def make_option(owner: type, name: str, unit: Fraction = Fraction(1), description: str | None = None) -> Any:
    """A key that stands for the field `name` of an option dataclass: it has that field's default, checks and, unless
    another one is given (for another unit), description."""
    mark, field = OptionOf(owner, name, unit), _get_fields(owner)[name]
    key: Any = Field(default=mark.make_default(), description=description or field.description)
    key.metadata = [*field.metadata, mark]
    return key


def collect_values(owner: type, *sections: Args) -> dict[str, Any]:
    """The values that the sections give an option dataclass, under the names and in the units of its fields."""
    return {
        mark.name: mark.to_field(getattr(section, key))
        for section in sections
        for key, mark in list_option_keys(type(section), owner)
    }


def list_option_keys(section: type[BaseModel], owner: type | None = None) -> Iterator[tuple[str, OptionOf]]:
    """The keys of a section that stand for fields of option dataclasses (of `owner`, unless None)."""
    for key, field in section.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, OptionOf) and owner in (None, mark.owner):
                yield key, mark


def _get_fields(owner: Any) -> Any:
    return owner.__pydantic_fields__


def _multiply(value: float, unit: Fraction) -> float:
    """Whole numbers stay whole, and decimal fractions as exact as a division leaves them."""
    product = value * unit.numerator
    if isinstance(product, int) and product % unit.denominator == 0:
        return product // unit.denominator
    return product / unit.denominator


def make_config_error(key: str, text: str) -> PydanticCustomError:
    """A problem with `key`, which is relative to the model that is being validated."""
    return PydanticCustomError("config", "{key}: {text}", {"key": key, "text": text})


def make_absolute(path: Path) -> Path:
    """`~` replaced, and not relative: the replicas of Ray Serve run in directories of their own."""
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise make_config_error(
            "", f"{path.parts[0]} is no user with a home directory here; write the whole path"
        ) from None


LocalPath = Annotated[Path, AfterValidator(make_absolute)]


def describe_problems(error: ValidationError, prefix: str) -> list[str]:
    """One line per problem, each beginning with the path of the key: `args.models[0].path: ...`."""
    lines = []
    for detail in error.errors(include_url=False, include_input=False):
        path = prefix + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"])
        text = describe_problem(detail)
        if detail["type"] == "config":
            key = str(detail["ctx"]["key"])
            path += key if key.startswith("[") or not key else f".{key}"
            text = str(detail["ctx"]["text"])
        lines.append(f"{path}: {text}")
    return lines
