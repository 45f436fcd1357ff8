"""Errors of pydantic in the words of TridentServe."""

from __future__ import annotations

from pydantic_core import ErrorDetails


def describe_problem(detail: ErrorDetails) -> str:
    """The problem of a value, in words that follow the path of its key."""
    if detail["type"] == "extra_forbidden":
        return "unknown key; check its spelling"
    if detail["type"] == "too_short":
        return f"must have {detail['ctx']['min_length']} or more of them, and has {detail['ctx']['actual_length']}"
    return detail["msg"].removeprefix("Value error, ")
