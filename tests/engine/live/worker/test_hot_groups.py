"""The hot set on real processes: every member makes its groups in one order, and a plan finds them ready."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from tests.parallel.members import CPU, TIMEOUT_S, Member, Pool
from tridentserve.cluster import WorkerSpec
from tridentserve.device import find_device
from tridentserve.engine.live.worker.executor import StageExecutor
from tridentserve.parallel import GroupCache
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.scheduling.estimation.hot_groups import list_hot_groups
from tridentserve.stages import Stage

WORKERS = [WorkerSpec(f"w{index}", "node", 1) for index in range(4)]
PLACEMENT = PlacementPlan({worker.worker_id: frozenset({Replica("m", Stage.DIFFUSE)}) for worker in WORKERS})


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(4)
    yield made
    made.close()


def make_and_use(member: Member, capacity: int) -> list[list[str]]:
    """The groups held after the start, and the name of the one that a plan of all four gets."""
    cache = GroupCache(member.store, CPU, capacity=capacity, timeout_s=TIMEOUT_S)
    # Groups need no replicas.
    executor = StageExecutor(f"w{member.rank}", cast(Any, None), cache, find_device(CPU))
    groups = list_hot_groups(WORKERS, PLACEMENT, max_degree=4)
    executor.make_groups([group for group in groups if executor._worker_id in group.workers], 1)
    held = list(cache.names)
    used = cache.acquire(groups[-1].name, member.rank, member.size, 1, groups[-1].workers).name
    executor.drop_groups_of("w1")
    return [held, [used], list(cache.names)]


def test_the_hot_set_is_made_at_the_start_and_dropped_with_a_member(pool: Pool) -> None:
    quad = "w0#0,w1#0,w2#0,w3#0/0"
    for rank, (held, used, left) in enumerate(pool.run(make_and_use, 4, 8)):
        pair = "w0#0,w1#0/0" if rank < 2 else "w2#0,w3#0/0"
        assert held == [pair, quad]
        assert used == [f"{quad}@-1"], "made before any plan"
        assert left == ([] if rank < 2 else [pair])
