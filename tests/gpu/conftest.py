"""Tests that need a GPU and no Ray: `make gpu-check` runs them without the common part of the other tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def gpu() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()
