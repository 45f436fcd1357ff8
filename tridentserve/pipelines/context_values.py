"""Values that hold inside a block of code, for the hooks of a model that is called there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def hold_value(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Inside the context the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
