"""Option dataclasses: each field is documented and checked where it is defined, and holds the option's only default."""

from __future__ import annotations

from functools import wraps
from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from tridentserve.errors import ConfigError
from tridentserve.validation import describe_problem

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def options(cls: type[T]) -> type[T]:
    """Class decorator: makes a frozen pydantic dataclass that raises `ConfigError`, with the names of the fields at
    fault, for values that its fields do not allow.

    The sections of the configuration refer to these fields (`deployments.config.base.option`)."""
    checked: Any = dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))(cls)
    check = checked.__init__

    @wraps(check)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        try:
            check(self, *args, **kwargs)
        except ValidationError as error:
            raise ConfigError("; ".join(map(_describe_problem, error.errors(include_url=False)))) from None

    checked.__init__ = __init__
    made: type[T] = checked
    return made


def _describe_problem(detail: ErrorDetails) -> str:
    path = ".".join(map(str, detail["loc"]))
    return f"{path} is {detail['input']!r}; {describe_problem(detail)}"
