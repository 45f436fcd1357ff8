"""Options with which Ray starts the processes that compute."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray

from tridentserve.engine.live.spawning.start_options import list_start_options
from tridentserve.process.heap import list_heap_variables


def test_workers_have_the_variables_beside_those_of_the_job(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody has set stays."""
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    expected = list_heap_variables()
    assert len(expected) == 3
    assert "MALLOC_ARENA_MAX" not in expected
    read: Any = ray.remote(num_cpus=0.1)(_list_variables)
    found = ray.get(read.options(**list_start_options(has_gpu=False)).remote())
    assert {name: found[name] for name in expected} == expected
    assert list_start_options(has_gpu=True) == {}


def _list_variables() -> dict[str, str]:
    return dict(os.environ)
