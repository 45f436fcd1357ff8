"""The bundles of a service in the order of their workers' places."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from deployments.assembly.planning import list_workers
from deployments.preparation.worker_places import find_device_links, order_bundles
from deployments.preparation.worker_seat import WorkerSeats
from tests.deployments.assembly.test_measured_tables import make_args
from tests.device.links.topologies import BRIDGES, HGX, list_devices
from tests.support.processes import output_of
from tridentserve.cluster import DeviceLinks
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.scheduling.estimation.hot_groups import list_hot_groups
from tridentserve.stages import Stage

ROOT = Path(__file__).parents[3]
D = frozenset({Replica("m", Stage.DIFFUSE)})


class SeatsOnGpus:
    """Seats whose bundles have these GPUs."""

    def __init__(self, found: list[DeviceLinks | None], num_gpus: float = 1.0) -> None:
        self.bundles = tuple(range(1, len(found) + 1))
        self.num_gpus = num_gpus
        self.asked: list[int] = []
        self._found = found

    async def run(self, index: int, function: Callable[..., Any], *args: Any) -> Any:
        assert (function, args) == (find_device_links, ("cuda",))
        self.asked.append(index)
        return self._found[index]


async def order(seats: SeatsOnGpus, nodes: list[str]) -> tuple[int, ...]:
    return await order_bundles(cast(WorkerSeats, seats), nodes, "cuda")


async def test_groups_of_aligned_places_are_joined_by_the_fastest_links(tmp_path: Path) -> None:
    """Ray has given the bundles 1 to 4 the GPUs 2, 0, 3, 1. Bridges join 0 with 3 and 1 with 2."""
    gpus, nodes = [2, 0, 3, 1], ["node"] * 4
    bundles = await order(SeatsOnGpus(list(list_devices(BRIDGES, gpus))), nodes)
    specs = list_workers(make_args(tmp_path, cluster={"workers_per_node": 4}), nodes)
    gpu_of = {spec.worker_id: gpus[bundle - 1] for spec, bundle in zip(specs, bundles, strict=True)}
    assert [spec.place for spec in specs] == [0, 1, 2, 3]
    placement = PlacementPlan({spec.worker_id: D for spec in specs})
    pairs = [{gpu_of[worker] for worker in group.workers} for group in list_hot_groups(specs, placement, 2)]
    assert pairs == [{0, 3}, {1, 2}]


async def test_each_node_has_an_order_of_its_own() -> None:
    found = [*list_devices(BRIDGES, [0, 1, 2]), *list_devices(HGX, [3, 1, 2, 0])]
    seats = SeatsOnGpus(list(found))
    assert await order(seats, ["a"] * 3 + ["b"] * 4) == (2, 3, 1, 7, 5, 6, 4)
    assert sorted(seats.asked) == list(range(7))


async def test_places_are_as_bundles_come_where_devices_are_shared_or_two() -> None:
    assert await order(SeatsOnGpus([None] * 4), ["a"] * 4) == (1, 2, 3, 4)
    for seats, nodes in (
        (SeatsOnGpus([None] * 4, num_gpus=0.0), ["a"] * 4),
        (SeatsOnGpus(list(list_devices(HGX, [1, 0, 3, 2]))), ["a", "a", "b", "b"]),
    ):
        assert await order(seats, nodes) == (1, 2, 3, 4)
        assert seats.asked == [], "nobody waits for what changes nothing"


_SERVICE = """
import asyncio, json
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from deployments.preparation.worker_places import order_bundles
from deployments.preparation.worker_seat import WorkerSeats
from tridentserve.cluster import DeviceLinks

def find_links(device):
    (gpu,) = ray.get_gpu_ids()
    return DeviceLinks(str(gpu), {str(other): int((gpu + other) % 2 == 0) for other in range(4)})

@ray.remote
class Worker:
    def find_gpu(self):
        return ray.get_gpu_ids()[0]

def start(bundle):
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return Worker.options(num_cpus=0.1, num_gpus=1.0, scheduling_strategy=strategy).remote()

ray.init(address="local", num_cpus=4, num_gpus=4, object_store_memory=128 << 20, include_dashboard=False)
try:
    group = placement_group([{"CPU": 0.1}, *[{"CPU": 0.1, "GPU": 1.0}] * 4], strategy="PACK")
    ray.get(group.ready())
    seats = WorkerSeats(group, (1, 2, 3, 4), 0.1, 1.0)
    bundles = asyncio.run(order_bundles(seats, ["node"] * 4, "cuda", find_links))
    seen = []
    for _ in range(2):  # a worker that comes back has the GPU that it had
        workers = [start(bundle) for bundle in bundles]
        seen.append(ray.get([worker.find_gpu.remote() for worker in reversed(workers)])[::-1])
        for worker in workers:
            ray.kill(worker)
    print("seen", json.dumps(seen))
finally:
    ray.shutdown()
"""


@pytest.mark.slow
def test_ray_gives_a_worker_the_gpu_of_its_bundle() -> None:
    """On a Ray that believes to have four GPUs, of which 0 and 2, and 1 and 3, are joined."""
    printed = output_of([sys.executable, "-c", _SERVICE], ROOT)
    (seen,) = (line for line in printed.splitlines() if line.startswith("seen "))
    assert json.loads(seen.removeprefix("seen ")) == [[0, 2, 1, 3]] * 2
