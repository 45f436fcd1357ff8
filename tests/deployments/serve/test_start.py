"""The start of a service's workers, with stand-ins for Ray and for their GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.preparation.worker_places import find_device_links
from deployments.preparation.worker_seat import WorkerSeats
from deployments.serve import start
from tests.deployments.assembly.test_measured_tables import make_args, write_measured
from tests.device.links.topologies import BRIDGES, list_devices

GPUS = [2, 0, 3, 1]  # of the bundles 1 to 4; bridges join 0 with 3 and 1 with 2


class SpawningError(Exception):
    """Here the start ends: the next thing would be to start the workers."""


async def test_workers_start_in_bundles_in_the_order_of_their_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(seats: WorkerSeats, index: int, function: Callable[..., Any], device: str) -> Any:
        assert function is find_device_links
        return found[seats.bundles[index] - 1]

    def spawn(num_cpus: float, gpus_per_worker: float, group: Any, bundles: tuple[int, ...], bring: Any) -> None:
        raise SpawningError(*bundles)

    found = list(list_devices(BRIDGES, GPUS))
    args = make_args(tmp_path, cluster={"workers_per_node": len(GPUS)})
    write_measured(args)
    group, store = SimpleNamespace(bundle_count=1 + len(GPUS)), SimpleNamespace(host="", port=0)
    monkeypatch.setattr("ray.util.get_current_placement_group", lambda: group)
    nodes = dict.fromkeys(range(group.bundle_count), "node")
    monkeypatch.setattr(start, "placement_group_table", lambda _: {"bundles_to_node_id": nodes})
    monkeypatch.setattr(start, "_start_store", lambda: (store, None))
    monkeypatch.setattr(WorkerSeats, "run", run)
    monkeypatch.setattr(start, "ActorSpawner", spawn)
    with pytest.raises(SpawningError) as reached:
        await start.start_engine(args, 1.0)
    gpus = [GPUS[bundle - 1] for bundle in reached.value.args]
    assert [set(gpus[:2]), set(gpus[2:])] == [{0, 3}, {1, 2}]
