"""Weights that are divided among the members of a group: bit for bit what whole weights compute at the same degree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.live.weights.test_layered_weights import make_layered, open_copy
from tests.parallel.members import Member, Pool
from tests.parallel.test_ulysses import of_plain, plain, run_steps
from tests.pipelines.models import PARALLEL, families, make_inputs, start
from tridentserve.errors import GroupError
from tridentserve.parallel import sequence_parallel
from tridentserve.pipelines import load_adapter
from tridentserve.stages import Stage
from tridentserve.weights_share import WeightsShare


def run_divided_steps(
    member: Member, folder: Path, copies: Path, state: dict[str, Any], unit: int, steps: int
) -> dict[str, Any]:
    """Some steps by all members, of which each keeps the shard of its place, twice with the same weights."""
    group = member.group("divided")
    adapter = load_adapter(folder, frozenset({Stage.DIFFUSE}), weights=False)
    copy = open_copy(folder, Stage.DIFFUSE, copies)
    layered = make_layered(copy, WeightsShare(unit=unit), member.rank % unit)
    layered.attach(adapter)
    results = []
    for _ in range(2):
        with layered.gather(group), sequence_parallel(group):
            results.append(plain(adapter.step(of_plain(state), steps)))
    assert np.array_equal(results[0]["tensors"]["latents"], results[1]["tensors"]["latents"])
    return results[0]


@pytest.mark.parametrize("variant", families(*PARALLEL, "wan-2.2"))
def test_shards_are_put_together_bit_for_bit(
    pool: Pool, model: Callable[[str], Path], variant: str, tmp_path: Path
) -> None:
    folder = model(variant)
    state = plain(start(folder, make_inputs(64, 96, variant=variant)))
    open_copy(folder, Stage.DIFFUSE, tmp_path)
    for degree, unit in ((2, 2), (4, 4), (4, 2)):
        whole = pool.run(run_steps, degree, folder, state, 2)
        for result in pool.run(run_divided_steps, degree, folder, tmp_path, state, unit, 2):
            if isinstance(result, Exception):
                raise result
            assert np.array_equal(result["tensors"]["latents"], whole[0]["tensors"]["latents"]), (degree, unit)


def test_a_group_of_other_workers_is_refused(pool: Pool, model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = model("sd3")
    state = plain(start(folder, make_inputs(64, 96)))
    open_copy(folder, Stage.DIFFUSE, tmp_path)
    for result in pool.run(run_divided_steps, 3, folder, tmp_path, state, 2, 1):
        assert isinstance(result, GroupError)
        assert "a group of 3 cannot put together weights that are divided among 2" in str(result)
