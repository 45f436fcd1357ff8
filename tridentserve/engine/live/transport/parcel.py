"""A parcel is the output of a stage for the next one: named tensors and numbers, packed into one run of bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tridentserve.device import WorkMark, find_device

# Slots start at multiples of this many bytes, so that every dtype is aligned and copies are fast.
ALIGNMENT_BYTES = 64
# From this size on, a CPU pass over the memory costs more than registering the tensors with NIXL.
MANY_BYTES = 4 << 20


def align(nbytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """`nbytes` rounded up to the alignment of slots."""
    return -(-nbytes // alignment_bytes) * alignment_bytes


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The position of one tensor in a packed parcel."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ParcelLayout:
    """The layout of a packed parcel, with the values that travel in addition to the bytes."""

    slots: tuple[TensorSlot, ...]
    nbytes: int
    values: dict[str, Any]


@dataclass(slots=True)
class Parcel:
    """A condition, a denoising state or final latents, on its way from one worker to another."""

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any] = field(default_factory=dict)
    made: WorkMark | None = field(default=None, compare=False)
    """The work that makes the tensors, where the device may not have done it yet."""

    def layout(self, alignment_bytes: int = ALIGNMENT_BYTES, as_in_memory: bool = False) -> ParcelLayout:
        """Slots in the order of the tensors. Each starts at a multiple of `alignment_bytes`, a multiple of
        `ALIGNMENT_BYTES`; with `as_in_memory`, as many bytes after one as the tensor now does in memory."""
        slots: list[TensorSlot] = []
        offset = 0
        for name, tensor in self.tensors.items():
            offset = align(offset, alignment_bytes) + (
                _measure_misalignment(tensor, alignment_bytes) if as_in_memory else 0
            )
            dtype = str(tensor.dtype).removeprefix("torch.")
            slots.append(TensorSlot(name, dtype, tuple(tensor.shape), offset, tensor.nbytes))
            offset += tensor.nbytes
        return ParcelLayout(tuple(slots), align(offset), self.values)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def is_on(self, device: torch.device) -> bool:
        """True when all tensors are on a device."""
        return all(tensor.device == device for tensor in self.tensors.values())

    def to(self, device: torch.device) -> Parcel:
        """The parcel on a device; tensors that are there already are not copied."""
        return Parcel({name: tensor.to(device) for name, tensor in self.tensors.items()}, self.values)

    def pack_into(self, buffer: torch.Tensor, layout: ParcelLayout) -> None:
        """Copy the tensors into a uint8 buffer of at least `layout.nbytes` bytes."""
        for slot in layout.slots:
            source = self.tensors[slot.name].contiguous().reshape(-1).view(torch.uint8)
            buffer[slot.offset : slot.offset + slot.nbytes].copy_(source)

    def pack(self, layout: ParcelLayout) -> torch.Tensor:
        """The tensors in a new uint8 buffer in host memory, pinned where they come from a GPU."""
        devices = (find_device(tensor.device) for tensor in self.tensors.values())
        device = next((one for one in devices if not one.is_host), find_device("cpu"))
        buffer = device.make_host_buffer(layout.nbytes)
        self.pack_into(buffer, layout)
        return buffer

    @classmethod
    def unpack(cls, buffer: torch.Tensor, layout: ParcelLayout, device: torch.device) -> Parcel:
        """Copies of the tensors in `buffer`, on `device`: the buffer may be reused at once."""
        views = cls.views(buffer, layout).tensors
        return cls({name: view.clone().to(device) for name, view in views.items()}, layout.values)

    @classmethod
    def views(cls, buffer: torch.Tensor, layout: ParcelLayout) -> Parcel:
        """The tensors in `buffer`, where they are."""
        tensors = {}
        for slot in layout.slots:
            raw = buffer[slot.offset : slot.offset + slot.nbytes]
            tensors[slot.name] = raw.view(getattr(torch, slot.dtype)).reshape(slot.shape)
        return cls(tensors, layout.values)


def _measure_misalignment(tensor: torch.Tensor, alignment_bytes: int) -> int:
    """The distance of the tensor's start from the last multiple of `alignment_bytes`, in bytes of whole elements: torch
    can view no others in a run of bytes."""
    return tensor.data_ptr() % alignment_bytes // tensor.itemsize * tensor.itemsize
