"""Settles which bundle of Ray's placement group gets which place in its node. Ray gives each bundle a GPU of its own
choice, and keeps it: a task in the bundle has the same one as the worker that starts there later, and as the next one
after that."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from deployments.preparation.place_order import order_devices
from deployments.preparation.worker_seat import WorkerSeats
from tridentserve.cluster import DeviceLinks

# In a smaller node every order is as good.
_FEWEST_TO_ORDER = 3

logger = logging.getLogger(__name__)

FindLinks = Callable[[str], DeviceLinks | None]


def find_device_links(device: str) -> DeviceLinks | None:
    """See `ComputeDevice.find_links`; runs in the place of a worker."""
    from tridentserve.device import find_device

    return find_device(device).find_links()


async def order_bundles(
    seats: WorkerSeats, nodes: Sequence[str], device: str, find_links: FindLinks = find_device_links
) -> tuple[int, ...]:
    """The bundles of all workers (`seats`, whose nodes are `nodes`), node after node: those of a node by the links of
    their devices, where these are known."""
    of_node: defaultdict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        of_node[node].append(index)
    if not seats.num_gpus or max(map(len, of_node.values())) < _FEWEST_TO_ORDER:
        return seats.bundles
    found = await asyncio.gather(*(seats.run(index, find_links, device) for index in range(len(nodes))))
    order: list[int] = []
    for node, indices in of_node.items():
        devices = [links for index in indices if (links := found[index]) is not None]
        if len(devices) == len(indices):
            indices = [indices[number] for number in order_devices(devices)]
            logger.info("node %s has its GPUs in the order %s", node, [found[index].address for index in indices])
        order += indices
    return tuple(seats.bundles[index] for index in order)
