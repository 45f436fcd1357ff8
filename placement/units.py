"""Units: the workers of a node that hold the weights of a stage together, and are planned with as one.

TridentServe, arXiv 2510.02838, appendix E.2. `placement.shares` says which stages need them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from tridentserve.cluster import WorkerSpec
from tridentserve.stages import PlacementType, VirtualReplica

WorkerCounts = dict[PlacementType, int]
# The number of workers of a type that hold a stage's weights together (appendix E.2); 1 for types that are not in it.
Units = Mapping[PlacementType, int]
ALONE: Units = MappingProxyType({})


def count_smallest_workable(replica: VirtualReplica, min_primaries: int = 1, units: Units = ALONE) -> int:
    """The fewest workers that cover E, D and C: enough primaries for the narrowest degree, a unit of each auxiliary."""
    return min_primaries + sum(units.get(kind, 1) for kind in replica.auxiliaries)


def list_block_sizes(workers: Iterable[WorkerSpec]) -> list[int]:
    """The powers of two of which some node has a whole block: 1, 2, 4 and 8 for 8 workers at places 0 to 7."""
    places = [(worker.node_id, worker.place) for worker in workers]
    sizes, size = [1], 2
    while any(n == size for n in Counter((node, place // size) for node, place in places).values()):
        sizes.append(size)
        size *= 2
    return sizes
