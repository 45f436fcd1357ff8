"""Model parallelism: the stages whose weights one worker cannot hold, and the smallest groups that can.

TridentServe, arXiv 2510.02838, appendix E.2: weights are divided only where they do not fit one GPU, among as few as
hold them under the largest load, and then these few are planned with as one. The paper divides D alone; here the same
holds for E and C, since a text encoder may outweigh a small GPU too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from profiler.memory import compute_peak_bytes_by_degree
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ProfileError
from tridentserve.load import LoadShare
from tridentserve.plans import Replica
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.stages import PlacementType, Stage, VirtualReplica

WorkerCounts = dict[PlacementType, int]
# The number of workers of a type that hold a stage's weights together (appendix E.2); 1 for types that are not in it.
Units = Mapping[PlacementType, int]
ALONE: Units = MappingProxyType({})


def count_smallest_workable(replica: VirtualReplica, min_primaries: int = 1, units: Units = ALONE) -> int:
    """The fewest workers that cover E, D and C: enough primaries for the narrowest degree, a unit of each auxiliary."""
    return min_primaries + sum(units.get(kind, 1) for kind in replica.auxiliaries)


def choose_units(
    times: StageTimes, load: Sequence[LoadShare], workers: Sequence[WorkerSpec], handoff_reserve_bytes: int
) -> dict[Replica, int]:
    """The stages of the load's models that have to be divided, each with the smallest power of two of workers in one
    node on which its weights and its activations fit at every size of the load (D at the degree that needs least).

    `times` has no divided stages (`CostModel.divide` takes what comes of this). The worker with the least memory
    decides. A stage that no node could hold is left out: planning refuses it, with the numbers. `ProfileError` for a
    model or size that is not profiled.
    """
    if not workers:
        return {}
    usable_bytes = min(worker.memory_bytes for worker in workers) - handoff_reserve_bytes
    sizes = list_block_sizes(workers)
    shapes: defaultdict[str, set[Shape]] = defaultdict(set)
    for share in load:
        if share.weight > 0:
            shapes[share.model].add(share.shape)
    units = {}
    for model in sorted(shapes):
        for stage in Stage:
            unit = next((k for k in sizes if _fits(times, model, stage, shapes[model], k, sizes, usable_bytes)), 1)
            if unit > 1:
                units[Replica(model, stage)] = unit
    return units


def list_block_sizes(workers: Iterable[WorkerSpec]) -> list[int]:
    """The powers of two of which some node has a whole block: 1, 2, 4 and 8 for 8 workers at places 0 to 7."""
    places = [(worker.node_id, worker.place) for worker in workers]
    sizes, size = [1], 2
    while any(n == size for n in Counter((node, place // size) for node, place in places).values()):
        sizes.append(size)
        size *= 2
    return sizes


def describe_divided_stages(units: Mapping[Replica, int], times: StageTimes) -> list[str]:
    """A line for each divided stage, with the reason. `times` is that of the divided stages."""
    return [
        f"{replica.model} {replica.stage.letter} is divided among units of {unit}: its weights and activations do not "
        f"fit fewer GPUs; each holds {times.weights_bytes(replica.model, replica.stage) / 1e9:.1f} GB of the weights"
        for replica, unit in sorted(units.items())
    ]


def _fits(
    times: StageTimes,
    model: str,
    stage: Stage,
    shapes: Iterable[Shape],
    unit: int,
    sizes: Sequence[int],
    usable_bytes: int,
) -> bool:
    """True when every size runs when this many workers hold the weights together."""
    shard_bytes = -(-times.weights_bytes(model, stage) // unit)
    degrees = [1]
    if stage is Stage.DIFFUSE:
        degrees = [degree for degree in times.degrees(model, stage) if unit <= degree and degree in sizes]
    return bool(degrees) and all(
        shard_bytes + _find_least_peak_bytes(times, model, stage, shape, degrees) <= usable_bytes for shape in shapes
    )


def _find_least_peak_bytes(times: StageTimes, model: str, stage: Stage, shape: Shape, degrees: Sequence[int]) -> float:
    """The least peak of one stage over these degrees; infinite where D was profiled at other degrees only."""
    try:
        return min(compute_peak_bytes_by_degree(times, model, (stage,), shape, degrees).values())
    except ProfileError:
        if stage is Stage.DIFFUSE and degrees[0] > 1:
            return float("inf")
        raise
