"""One of eight members of a group is killed while they compute together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device.lost_member import RECORDING, lose_member
from tests.parallel.members import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(8)
    yield pool
    pool.close()


@pytest.mark.parametrize("kind", ["cpu", RECORDING])
def test_the_other_seven_are_freed(pool: Pool, kind: str) -> None:
    lose_member(pool, kind, size=8, lost=5)
    pool.replace(5)
