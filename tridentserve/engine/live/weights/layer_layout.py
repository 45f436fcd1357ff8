"""The layers in the run of bytes of a host copy, and the layout in which a worker keeps a part of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tridentserve.engine.live.transport.parcel import Parcel, ParcelLayout, TensorSlot, align
from tridentserve.engine.live.weights.host_copies import HostCopy
from tridentserve.models.layers import name_layer
from tridentserve.weights_share import SLOT_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Layer:
    """Tensors that follow each other in a run of bytes: those of one layer, or some outside all layers."""

    path: str | None
    """The path of the layer's module, with the component before it; None outside all layers."""
    slots: tuple[TensorSlot, ...]
    """The tensors, as they lie in the host copy."""

    @property
    def start(self) -> int:
        """Offset of the first byte in the host copy."""
        return self.slots[0].offset

    @property
    def num_bytes(self) -> int:
        """Bytes from the first tensor's begin to the last one's end."""
        return self.slots[-1].offset + self.slots[-1].nbytes - self.start

    @property
    def indent_bytes(self) -> int:
        """Where its bytes begin after a multiple of `SLOT_ALIGNMENT_BYTES`."""
        return self.start % SLOT_ALIGNMENT_BYTES

    def view(self, buffer: torch.Tensor, offset: int) -> dict[str, torch.Tensor]:
        """Its tensors, by slot, in a buffer in which its bytes begin at `offset`."""
        moved = tuple(replace(slot, offset=slot.offset - self.start + offset) for slot in self.slots)
        return Parcel.views(buffer, ParcelLayout(moved, buffer.numel(), {})).tensors


def split_into_layers(copy: HostCopy) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """The layers of a host copy in their order, and the runs outside all layers. Tensors that several layers share, and
    layers whose tensors do not follow each other, are outside."""
    owners: dict[str, str | None] = {}
    for name, slot in copy.names.items():
        path = name_layer(name)
        owners[slot] = path if owners.setdefault(slot, path) == path else None
    runs = list(_list_runs(copy, owners))
    times = Counter(run.path for run in runs)
    whole = [run if times[run.path] == 1 else replace(run, path=None) for run in runs]
    return tuple(run for run in whole if run.path is not None), tuple(run for run in whole if run.path is None)


def _list_runs(copy: HostCopy, owners: dict[str, str | None]) -> Iterator[Layer]:
    """The slots in the order of their offsets, by owner."""
    run: list[TensorSlot] = []
    for slot in sorted(copy.layout.slots, key=lambda slot: slot.offset):
        if run and owners[run[0].name] != owners[slot.name]:
            yield Layer(owners[run[0].name], tuple(run))
            run = []
        run.append(slot)
    if run:
        yield Layer(owners[run[0].name], tuple(run))


def place_after(end: int, layer: Layer) -> int:
    """The first offset from `end` on at which a layer's tensors are aligned as in the host copy."""
    return align(end, SLOT_ALIGNMENT_BYTES) + layer.indent_bytes
