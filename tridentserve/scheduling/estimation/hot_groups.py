"""Process groups by name, and those made when a service starts: the hot set (arXiv 2510.02838, section 5.2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tridentserve.cluster import WorkerSpec
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.stages import Stage

# The memory that one group takes from a worker, by the kind of device. gloo: 0.7 MiB measured (8 members); NCCL:
# estimated (buffers of 4 MiB per channel, direction and peer), as memory of its own that torch does not count.
GROUP_BYTES = {"cpu": 1 << 20, "cuda": 128 << 20}
# The most that a group of NCCL has been seen to take anywhere (544 to 688 MB, by others).
LARGEST_GROUP_BYTES = 688_000_000


@dataclass(frozen=True, slots=True)
class HotGroup:
    """A group that its members make before any plan asks for it. `workers` is in rank order."""

    name: str
    workers: tuple[WorkerId, ...]


def group_name(members: Sequence[tuple[WorkerId, int]], failures: int = 0) -> str:
    """The name of the group of these workers (with their incarnations), which has failed `failures` times before."""
    return f"{','.join(f'{worker_id}#{incarnation}' for worker_id, incarnation in members)}/{failures}"


def count_hot_groups(num_workers: int) -> int:
    """The most hot groups that one worker of a node of this many is in: a pair, a quad and an octet of 8."""
    return num_workers.bit_length() - 1


def list_hot_groups(
    workers: Sequence[WorkerSpec],
    placement: PlacementPlan,
    max_degree: int,
    incarnations: Mapping[WorkerId, int] | None = None,
) -> list[HotGroup]:
    """The aligned power-of-two blocks, up to `max_degree` wide, of workers that may run D together: of 8 alike on one
    node 4 pairs, 2 quads, 1 octet. These are the sets that dispatchers prefer (`dispatch.workers.pools`). Narrow ones
    first, so that members that make them in this order never wait for one another in a circle. `incarnations`: those of
    workers that have been replaced."""
    alike: defaultdict[tuple[str, int, frozenset[Replica]], list[WorkerId]] = defaultdict(list)
    for worker in sorted(workers, key=lambda worker: (worker.place, worker.worker_id)):
        held = placement.replicas.get(worker.worker_id, frozenset())
        if any(replica.stage is Stage.DIFFUSE for replica in held):
            alike[worker.node_id, worker.memory_bytes, held].append(worker.worker_id)
    blocks = [block for ids in alike.values() for block in _list_blocks(ids, max_degree)]
    return [
        HotGroup(group_name([(worker_id, (incarnations or {}).get(worker_id, 0)) for worker_id in block]), block)
        for block in sorted(blocks, key=lambda block: (len(block), block))
    ]


def _list_blocks(worker_ids: Sequence[WorkerId], max_degree: int) -> Iterator[tuple[WorkerId, ...]]:
    degree = 2
    while degree <= min(max_degree, len(worker_ids)):
        for start in range(0, len(worker_ids) - degree + 1, degree):
            yield tuple(worker_ids[start : start + degree])
        degree *= 2
