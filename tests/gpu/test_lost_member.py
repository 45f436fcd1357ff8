"""On several GPUs, the collectives of the other members end when one is killed, and their processes live on."""

from __future__ import annotations

import pytest
import torch

from tests.device.lost_member import lose_member
from tests.parallel.members import Pool

pytestmark = pytest.mark.gpu
_MOST_GPUS = 8


def test_the_others_are_freed(gpu: torch.device) -> None:
    size = min(torch.cuda.device_count(), _MOST_GPUS)
    if size < 2:
        pytest.skip("needs two GPUs")
    pool = Pool(size, gpu)
    try:
        lose_member(pool, gpu.type, size, lost=size - 1)
    finally:
        pool.close()
