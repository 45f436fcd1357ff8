"""Weights of which a worker keeps no layer, or only a shard of each: the layers are in memory in turns, in two slots.

Each layer is called through a hook, which waits until its bytes are in its slot, and begins to bring the next layer
into the other slot while this one computes. The tensors of a layer are views of its slot, so that nothing but bytes
moves, and what is computed is what whole weights compute, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch

from tridentserve.engine.live.weights.host_copies import HostCopy
from tridentserve.engine.live.weights.layer_layout import Layer, place_after, split_into_layers
from tridentserve.engine.live.weights.layer_supplies import GroupSupply, HostSupply, LayerSupply
from tridentserve.errors import GroupError, WorkerError
from tridentserve.parallel import SequenceGroup
from tridentserve.pipelines import weights
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.base import PipelineAdapter, Tensors
from tridentserve.weights_share import SLOT_ALIGNMENT_BYTES, WeightsShare, count_shard_bytes

NUM_SLOTS = 2
"""Layers that are in memory at once."""


class LayeredLayout:
    """The places of all that a worker keeps of a replica, in one buffer: what lies outside the layers, and the shards
    of these."""

    def __init__(self, copy: HostCopy, share: WeightsShare, shard: int) -> None:
        """`shard`: the number of the shards that the worker keeps; 0 where it keeps none."""
        self.copy, self.share, self.shard = copy, share, shard
        self.layers, self.rest = split_into_layers(copy)
        end = 0
        self._rest_offsets: list[int] = []
        for run in self.rest:
            self._rest_offsets.append(place_after(end, run))
            end = self._rest_offsets[-1] + run.num_bytes
        self._shard_offsets: dict[Layer, int] = {}
        for layer in () if share.streamed else self.layers:
            self._shard_offsets[layer] = place_after(end, layer) - layer.indent_bytes
            end = self._shard_offsets[layer] + self._count_shard_bytes(layer)
        self.kept_bytes = end
        widest = max((share.unit * self._count_shard_bytes(layer) for layer in self.layers), default=0)
        self.slot_bytes = widest + SLOT_ALIGNMENT_BYTES

    @property
    def num_bytes(self) -> int:
        """All bytes that the replica takes on the device."""
        return self.kept_bytes + NUM_SLOTS * self.slot_bytes

    def fill(self, kept: torch.Tensor, copy_bytes: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Fill the buffer of what is kept from the host copy."""
        run = self.copy.buffer
        for rest, offset in zip(self.rest, self._rest_offsets, strict=True):
            copy_bytes(kept[offset : offset + rest.num_bytes], run[rest.start : rest.start + rest.num_bytes])
        for layer, offset in self._shard_offsets.items():
            size = self._count_shard_bytes(layer)
            start = layer.start + self.shard * size
            part = run[start : min(start + size, layer.start + layer.num_bytes)]
            copy_bytes(kept[offset : offset + part.numel()], part)

    def find_shard(self, kept: torch.Tensor, layer: Layer) -> torch.Tensor:
        """The bytes of this worker's shard of a layer."""
        offset = self._shard_offsets[layer]
        return kept[offset : offset + self._count_shard_bytes(layer)]

    def view(self, kept: torch.Tensor, slots: list[torch.Tensor]) -> Tensors:
        """The tensors of the models by name: those outside the layers where they are kept, and those of the layers in
        their slots, which take turns."""
        views: Tensors = {}
        for rest, offset in zip(self.rest, self._rest_offsets, strict=True):
            views |= rest.view(kept, offset)
        for number, layer in enumerate(self.layers):
            views |= layer.view(slots[number % NUM_SLOTS], layer.indent_bytes)
        return {name: views[slot] for name, slot in self.copy.names.items()}

    def _count_shard_bytes(self, layer: Layer) -> int:
        return count_shard_bytes(layer.num_bytes, self.share.unit)


class LayeredWeights:
    """A replica of which the layers are in memory in turns. While it is attached it belongs to the thread that
    computes."""

    def __init__(self, layout: LayeredLayout, kept: torch.Tensor, slots: list[torch.Tensor]) -> None:
        """`kept`: the filled buffer of `layout`; `slots`: two buffers of its `slot_bytes`."""
        self._layout, self._kept, self._slots = layout, kept, slots
        self._inside: list[int | None] = [None] * NUM_SLOTS  # the layer in each slot, or on its way there
        self._arriving: list[Callable[[], None] | None] = [None] * NUM_SLOTS
        self._host = HostSupply(layout.copy.buffer, kept.device) if layout.share.streamed else None
        self._supply: LayerSupply | None = self._host
        self._entered: int | None = None  # the layer that was called last
        self._followers: dict[int, int] = {}  # the layer that was called after each layer
        self._hooks: list[Any] = []

    @property
    def is_streamed(self) -> bool:
        """True when layers come from the host copy."""
        return self._host is not None

    def begin(self) -> None:
        """Begin to bring the first layers, where they come from the host copy: they are called first."""
        if self._host is not None:
            for number in range(min(NUM_SLOTS, len(self._layout.layers))):
                self._start(number)

    def attach(self, adapter: PipelineAdapter) -> None:
        """Give the models of an adapter these weights."""
        weights.attach(adapter, self._layout.view(self._kept, self._slots))
        components = cast(DiffusersAdapter, adapter).pipe.components
        for number, layer in enumerate(self._layout.layers):
            component, _, path = cast(str, layer.path).partition(".")
            module = components[component].get_submodule(path)
            self._hooks.append(module.register_forward_pre_hook(self._make_hook(number)))

    def detach(self, adapter: PipelineAdapter) -> None:
        """Take the weights out of the models again, and end what brings layers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.close()
        weights.detach(adapter)

    def close(self) -> None:
        """Wait for what is on its way, and end what brings layers; also of weights that were never attached, and again
        of those that were."""
        self._settle()
        if self._host is not None:
            self._host.close()

    @contextmanager
    def gather(self, group: SequenceGroup | None) -> Iterator[None]:
        """Let the models compute, together with a group where the layers are divided. All of its members call them
        equally, and begin and end with empty slots: no one knows what is in those of another."""
        share, layout = self._layout.share, self._layout
        if share.streamed:
            yield
            return
        if group is None:
            raise WorkerError(f"these weights are divided among {share.unit} workers, and one alone cannot compute")
        self._supply = GroupSupply(group, share.unit, layout.shard, lambda layer: layout.find_shard(self._kept, layer))
        try:
            yield
            self._settle()
        finally:
            with suppress(GroupError):  # after an error the group is of no use any more
                self._settle()
            self._supply = None

    def _make_hook(self, number: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            self._enter(number)

        return hook

    def _enter(self, number: int) -> None:
        """Have a layer in its slot, and begin to bring the one that came next the last time, or else comes next in the
        model."""
        slot = number % NUM_SLOTS
        if self._inside[slot] != number:
            self._start(number)
        self._finish(slot)
        if self._entered is not None:
            self._followers[self._entered] = number
        self._entered = number
        following = self._followers.get(number, (number + 1) % len(self._layout.layers))
        if following % NUM_SLOTS != slot and self._inside[following % NUM_SLOTS] != following:
            self._start(following)

    def _start(self, number: int) -> None:
        slot, layer = number % NUM_SLOTS, self._layout.layers[number]
        self._finish(slot)
        if self._supply is None:
            raise WorkerError("divided weights are used outside a plan")
        self._inside[slot] = None
        target = self._slots[slot][layer.indent_bytes :]
        self._arriving[slot] = self._supply.start(layer, target)
        self._inside[slot] = number

    def _finish(self, slot: int) -> None:
        finish, self._arriving[slot] = self._arriving[slot], None
        if finish is not None:
            finish()

    def _settle(self) -> None:
        """Wait for what is on its way, and forget what is in the slots and which layer comes after which."""
        arriving = [finish for finish in self._arriving if finish is not None]
        self._entered = None
        self._followers.clear()
        self._inside, self._arriving = [None] * NUM_SLOTS, [None] * NUM_SLOTS
        for finish in arriving:
            finish()
