"""The log of replicas: what is left out of it, and what is shortened."""

from __future__ import annotations

import logging
import sys
from types import TracebackType

import pytest

from deployments.replica_logs import ServeLogFilter

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def raised(error: Exception) -> ExcInfo:
    try:
        raise error
    except type(error):
        kind, found, traceback = sys.exc_info()
        assert kind is not None
        assert found is not None
        return kind, found, traceback


def record(message: str, exc_info: ExcInfo | None = None) -> logging.LogRecord:
    return logging.LogRecord("ray.serve", logging.ERROR, "replica.py", 1, message, (), exc_info)


def test_internal_calls_are_left_out() -> None:
    assert not ServeLogFilter().filter(record("CALL get_catalogue OK 2000.1ms"))
    assert ServeLogFilter().filter(record("CALL get_catalogue ERROR 2000.1ms"))
    assert ServeLogFilter().filter(record("CALL generate OK 2000.1ms"))


def test_a_refused_call_of_a_handle_is_one_line() -> None:
    refused = record("Request failed.", raised(ValueError("invalid_request: prompt: must not be empty")))
    assert ServeLogFilter().filter(refused)
    assert "\n" not in logging.Formatter().format(refused)
    assert "prompt: must not be empty" in refused.getMessage()
    assert refused.levelname == "WARNING"


@pytest.mark.parametrize("error", [ValueError("no code"), RuntimeError("internal_error: a defect"), KeyError("x")])
def test_a_defect_keeps_its_traceback(error: Exception) -> None:
    failed = record("Request failed.", raised(error))
    assert ServeLogFilter().filter(failed)
    assert "Traceback" in logging.Formatter().format(failed)
