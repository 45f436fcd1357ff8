"""How many workers of a node may denoise at once."""

from __future__ import annotations

import os
from collections.abc import Collection

import pytest

from tridentserve.engine.options import WorkerOptions


@pytest.mark.parametrize(
    ("options", "cores", "most"),
    [
        (WorkerOptions(), range(6), 6),
        (WorkerOptions(num_threads=4), range(6), 1),
        (WorkerOptions(num_threads=3), range(6), 2),
        (WorkerOptions(num_threads=4), [2], 1),
        (WorkerOptions(max_denoising=5), [2], 5),
        (WorkerOptions(torch_device="cuda"), range(6), None),
        (WorkerOptions(torch_device="cuda", max_denoising=2), range(6), 2),
    ],
)
def test_as_many_workers_denoise_as_there_are_cores_for(
    options: WorkerOptions, cores: Collection[int], most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    assert options.count_denoising() == most
