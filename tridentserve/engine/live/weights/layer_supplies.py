"""The places from which a layer comes into its slot: the host copy, or the shards on the workers of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tridentserve.device import find_device
from tridentserve.engine.live.weights.layer_layout import Layer
from tridentserve.errors import GroupError
from tridentserve.parallel import SequenceGroup
from tridentserve.weights_share import SHARD_MULTIPLE_BYTES


class LayerSupply(Protocol):
    """Fills slots. `start` is called with one layer after another, in the thread that computes."""

    def start(self, layer: Layer, slot: torch.Tensor) -> Callable[[], None]:
        """Begin to put the bytes of a layer at the beginning of a slot, which computations that have been started may
        still read. Returns the function after which they can be used."""


class HostSupply:
    """Copies layers from the host copy, beside what computes."""

    def __init__(self, run: torch.Tensor, device: torch.device) -> None:
        """`run`: the bytes of the host copy."""
        self._run = run
        self._copies = find_device(device).make_layer_copies()

    def start(self, layer: Layer, slot: torch.Tensor) -> Callable[[], None]:
        source, target = self._run[layer.start : layer.start + layer.num_bytes], slot[: layer.num_bytes]
        return self._copies.start(target, source)

    def close(self) -> None:
        """No more layers are asked for. A copy that has begun ends."""
        self._copies.close()


class GroupSupply:
    """Gathers layers from the shards of a group of workers: one unit, or several whole ones, each with all shards.

    The workers of a group are in the order of their places, so that rank r has the shard r modulo the unit. Of several
    units each sends its part of every shard, so that all workers send equally much."""

    def __init__(
        self, group: SequenceGroup, unit: int, shard: int, find_shard: Callable[[Layer], torch.Tensor]
    ) -> None:
        """`find_shard` gives the bytes of the shard of a layer that this worker keeps, whose number is `shard`. Raises
        `GroupError` for a group of other than whole units, or in another order."""
        self._group, self._find_shard = group, find_shard
        self._units = group.size // unit
        if group.size % unit or SHARD_MULTIPLE_BYTES % self._units:
            raise GroupError(f"a group of {group.size} cannot put together weights that are divided among {unit}")
        if group.rank % unit != shard:
            raise GroupError(f"rank {group.rank} has shard {shard} of {unit}: the group is not in the order of places")
        self._part = group.rank // unit
        # A shard is as many parts as there are units; that of rank r is in the shard r % unit.
        self._positions = [rank % unit * self._units + rank // unit for rank in range(group.size)]

    def start(self, layer: Layer, slot: torch.Tensor) -> Callable[[], None]:
        shard = self._find_shard(layer)
        part = shard.view(self._units, -1)[self._part]
        return self._group.start_gather(slot[: len(self._positions) * part.numel()], part, self._positions)
