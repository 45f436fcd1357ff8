"""Memory that takes part in NIXL's writes: its address, and its registration with NIXL."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tridentserve.device import find_device


@dataclass(frozen=True, slots=True)
class Memory:
    """A run of bytes in registered memory of a process. `device_id` is 0 for host memory."""

    address: int
    nbytes: int
    device_id: int

    def part(self, offset: int, nbytes: int) -> Memory:
        return Memory(self.address + offset, nbytes, self.device_id)

    def holds(self, other: Memory) -> bool:
        """True when `other` lies in this memory."""
        first, last = other.address - self.address, other.address + other.nbytes - self.address
        return self.device_id == other.device_id and first >= 0 and last <= self.nbytes


def locate_memory(tensor: torch.Tensor) -> Memory:
    """The memory in which a contiguous tensor lies."""
    return Memory(tensor.data_ptr(), tensor.nbytes, find_device(tensor.device).find_memory_id(tensor))


@dataclass(slots=True)
class _Registration:
    """A registration of memory with NIXL."""

    registration: Any
    """NIXL's own object."""
    holders: int = 0
    """Number of callers that hold the memory."""


class RegisteredMemory:
    """The registered memory of one agent. All methods are called in the agent's thread.

    Memory is registered once, however many callers hold it: NIXL does not tell two registrations of the same memory
    apart."""

    def __init__(self, agent: Any, kind: str) -> None:
        self._agent = agent
        self._kind = kind
        self._held: dict[Memory, _Registration] = {}

    def hold(self, memory: Memory) -> Any:
        """Register memory, until `let_go` has been called as often as this; returns NIXL's registration."""
        if memory not in self._held:
            region = (memory.address, memory.nbytes, memory.device_id, "")
            self._held[memory] = _Registration(self._agent.register_memory([region], mem_type=self._kind))
        self._held[memory].holders += 1
        return self._held[memory].registration

    def let_go(self, memory: Memory) -> None:
        """Deregister memory when no caller holds it any more. No write may be under way there."""
        held = self._held[memory]
        held.holders -= 1
        if not held.holders:
            del self._held[memory]
            self._agent.deregister_memory(held.registration)

    def make_descriptors(self, memories: Iterable[Memory]) -> Any:
        """Descriptors for a transfer, of this agent's memory or another's."""
        regions = [(memory.address, memory.nbytes, memory.device_id) for memory in memories]
        return self._agent.get_xfer_descs(regions, mem_type=self._kind)
