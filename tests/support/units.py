"""Stages that are divided among units of workers, as numbers of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placement.shares import choose_shares
from profiler import CostModel
from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.plans import Replica
from tridentserve.weights_share import WeightsShare


def choose_units(
    times: CostModel, load: Sequence[LoadShare], workers: Sequence[WorkerSpec], reserve_bytes: int
) -> dict[Replica, int]:
    """The sizes of the units that the load needs."""
    shares = choose_shares(times, load, workers, reserve_bytes)
    return {replica: share.unit for replica, share in shares.items()}


def divide(times: CostModel, units: Mapping[Replica, int]) -> CostModel:
    """The times where these stages are divided."""
    return times.share({replica: WeightsShare(unit) for replica, unit in units.items()}, {})
