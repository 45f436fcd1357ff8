"""The directory in which the tiny pipelines are kept, for the service and the scripts alike."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.processes import run
from tridentserve.errors import ConfigError
from tridentserve.models.cache import CACHE_ENV, cache_dir


def test_the_environment_chooses_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for value, expected in (
        ("/fast/disk", "/fast/disk"),
        ("~/mine", "/home/me/mine"),
        ("", "/home/me/.cache/tridentserve"),
    ):
        monkeypatch.setenv(CACHE_ENV, value)
        assert cache_dir() == Path(expected)
    monkeypatch.delenv(CACHE_ENV)
    assert cache_dir() == Path("/home/me/.cache/tridentserve")


def test_a_home_directory_that_does_not_exist_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_ENV, "~nobody-of-this-name/cache")
    with pytest.raises(
        ConfigError, match=r"~nobody-of-this-name/cache names no known home directory; set \$TRIDENTSERVE_CACHE"
    ):
        cache_dir()


def test_it_starts_without_torch() -> None:
    code = "import sys, tridentserve.models.cache; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code]).returncode == 0
