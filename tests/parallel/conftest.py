from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.members import Pool
from tests.pipelines.conftest import model, small_input_images

__all__ = ["model", "pool", "small_input_images"]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes, shared by all tests."""
    pool = Pool(4)
    yield pool
    pool.close()
