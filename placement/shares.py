"""The stages whose weights one worker cannot hold: the smallest groups that can, and those that are streamed.

TridentServe, arXiv 2510.02838, appendix E.2: weights are divided only where they do not fit one GPU, among as few as
hold them under the largest load, and then these few are planned with as one. The paper divides D alone; here the same
can hold for E and C, since a text encoder may outweigh a small GPU too. Streaming is not in the paper.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from placement.units import list_block_sizes
from profiler import CostModel
from profiler.memory import compute_peak_bytes_by_degree
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ProfileError
from tridentserve.load import LoadShare
from tridentserve.plans import Replica
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.stages import Stage
from tridentserve.weights_share import WHOLE, LayerSizes, WeightsShare


@dataclass(frozen=True, slots=True)
class AllowedShares:
    """The ways in which workers may keep the weights of a stage."""

    whole: bool = True
    divided: bool = True
    streamed: bool = True
    layers: LayerSizes | None = None
    """Its layers, in whatever number format. Without them it cannot be streamed, and counts as if layers were all that
    it has."""


def choose_shares(
    times: CostModel,
    load: Sequence[LoadShare],
    workers: Sequence[WorkerSpec],
    handoff_reserve_bytes: int,
    allowed: Mapping[Replica, AllowedShares] = MappingProxyType({}),
) -> dict[Replica, WeightsShare]:
    """The stages of the load's models of which a worker cannot keep all weights beside the activations of every size
    (D at the degree that needs least), each with the share that it keeps. The worker with the least memory decides.

    A stage is divided among the smallest power of two of workers in one node on which it fits, or streamed. Where both
    can be, the way that takes fewer worker-seconds for the load is taken. `allowed` has the stages that may not be kept
    in all ways. A stage that fits in no way is left out: planning refuses it, with the numbers.

    `times` has whole stages (`CostModel.share` takes what comes of this).
    `ProfileError` for a model or size that is not profiled.
    """
    if not workers:
        return {}
    usable_bytes = min(worker.memory_bytes for worker in workers) - handoff_reserve_bytes
    chooser = _ShareChooser(times, usable_bytes, list_block_sizes(workers))
    loads: defaultdict[str, list[LoadShare]] = defaultdict(list)
    for kind in load:
        if kind.weight > 0:
            loads[kind.model].append(kind)
    shares = {}
    for model in sorted(loads):
        for stage in Stage:
            replica = Replica(model, stage)
            share = chooser.choose(replica, loads[model], allowed.get(replica, AllowedShares()))
            if not share.is_whole:
                shares[replica] = share
    return shares


def describe_shares(times: CostModel) -> list[str]:
    """A line for each stage of which workers do not keep all weights."""
    lines = []
    for replica, share in sorted(times.shares.items()):
        kept = f"{times.weights_bytes(replica.model, replica.stage) / 1e9:.1f} GB"
        name = f"{replica.model} {replica.stage.letter}"
        if share.streamed:
            lines.append(
                f"{name} is streamed: a worker keeps {kept} of the weights, and copies each layer from the host copy "
                "before it computes"
            )
        else:
            lines.append(
                f"{name} is divided among units of {share.unit}: its weights and activations do not fit fewer workers; "
                f"each holds {kept} of the weights"
            )
    return lines


@dataclass(frozen=True, slots=True)
class _ShareChooser:
    """Compares the ways to keep the weights of a stage."""

    times: CostModel
    """Times of whole stages."""
    usable_bytes: int
    """Memory of a worker for weights and activations."""
    sizes: Sequence[int]
    """The degrees that nodes can form, which are the sizes of units too."""

    def choose(self, replica: Replica, load: Sequence[LoadShare], allowed: AllowedShares) -> WeightsShare:
        """The share of one stage; `WHOLE` where it fits in no way."""
        if allowed.whole and self._fits(self.times, replica, load):
            return WHOLE
        best, least_s = WHOLE, math.inf
        ways = [WeightsShare(unit) for unit in self.sizes[1:] if allowed.divided]
        if allowed.layers is not None and allowed.streamed:
            ways.append(WeightsShare(streamed=True))
        for share in ways:
            shared = self.times.share({replica: share}, {replica: allowed.layers} if allowed.layers else {})
            if 1 < best.unit < share.unit or not self._fits(shared, replica, load):
                continue
            seconds = self._sum_worker_seconds(shared, replica, load)
            if best.is_whole or seconds < least_s:
                best, least_s = share, seconds
        return best

    def _list_degrees(self, times: CostModel, replica: Replica) -> list[int]:
        if replica.stage is not Stage.DIFFUSE:
            return [times.unit(replica.model, replica.stage)]
        return [degree for degree in times.degrees(replica.model, replica.stage) if degree in self.sizes]

    def _fits(self, times: CostModel, replica: Replica, load: Sequence[LoadShare]) -> bool:
        """True when every size runs where workers keep what these times say of the weights."""
        kept_bytes, degrees = times.weights_bytes(replica.model, replica.stage), self._list_degrees(times, replica)
        return bool(degrees) and all(
            kept_bytes + _find_least_peak_bytes(self.times, replica.model, replica.stage, kind.shape, degrees)
            <= self.usable_bytes
            for kind in load
        )

    def _sum_worker_seconds(self, times: CostModel, replica: Replica, load: Sequence[LoadShare]) -> float:
        """Worker-seconds of the load's runs of a stage, each at the degree that takes fewest."""
        total_s = 0.0
        for kind in load:
            costs = []
            for degree in self._list_degrees(times, replica):
                # Wide degrees need not cover small sizes, nor narrow ones large sizes.
                with suppress(ProfileError):
                    costs.append(degree * times.seconds(replica.model, replica.stage, kind.shape, degree))
            total_s += kind.weight * (kind.num_inference_steps if replica.stage is Stage.DIFFUSE else 1) * min(costs)
        return total_s


def _find_least_peak_bytes(times: StageTimes, model: str, stage: Stage, shape: Shape, degrees: Sequence[int]) -> float:
    """The least peak of one stage over these degrees; infinite where D was profiled at other degrees only."""
    try:
        return min(compute_peak_bytes_by_degree(times, model, (stage,), shape, degrees).values())
    except ProfileError:
        if stage is Stage.DIFFUSE and degrees[0] > 1:
            return float("inf")
        raise
