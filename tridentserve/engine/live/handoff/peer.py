"""The names of parcels, and the interface through which handoff buffers call one another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from tridentserve.engine.live.transport.parcel import ParcelLayout
from tridentserve.plans import WorkerId

HandoffPath = Literal["nixl", "host", "local"]
# In place of a slot: the parcel has arrived already, and need not be sent again.
ALREADY_HERE = -1


@dataclass(frozen=True, slots=True)
class HandoffKey:
    """Names the output of one plan for a request. A request that starts again gets new plans, so keys are unique."""

    request_id: str
    plan_id: int
    step: int | None = None
    """Names a state checkpoint instead: the one that the plan made after this number of the request's steps."""

    def to_note(self) -> bytes:
        return f"{self.plan_id}:{'' if self.step is None else self.step}:{self.request_id}".encode()


@dataclass(frozen=True, slots=True)
class CompletedTransfer:
    """One handoff that took place, for the metrics."""

    path: HandoffPath
    nbytes: int
    seconds: float


class Peer(Protocol):
    """The handoff buffer of another worker, reached through its actor."""

    @property
    def link_name(self) -> str | None:
        """Name of the worker's NIXL agent; None when it has none."""

    @property
    def shares_memory(self) -> bool:
        """True of a peer on this node, which can map the same files."""

    async def reserve_slot(self, key: HandoffKey, producer: WorkerId, layout: ParcelLayout) -> int | None:
        """Reserve a slot in the peer's slab; its offset, None when the slab has no room or the parcel has a slot, or
        `ALREADY_HERE` when the parcel is there. The note of the write tells the peer when the bytes are there."""

    async def release_slot(self, key: HandoffKey) -> None:
        """Give the slot back, because the bytes will not come."""

    async def deliver_parcel(self, key: HandoffKey, layout: ParcelLayout, buffer: torch.Tensor) -> None:
        """Send the bytes themselves into the peer's host memory."""

    async def deliver_file(self, key: HandoffKey, layout: ParcelLayout, path: Path) -> None:
        """Have the peer map a file in memory with the bytes (see `SharedParcels`)."""

    async def keep_checkpoint(self, key: HandoffKey) -> None:
        """Have the peer keep a parcel that has arrived as a state checkpoint, in its host memory."""

    async def send_output(self, key: HandoffKey, to: WorkerId) -> None:
        """Have the peer push an output (again) to worker `to`; returns when it has arrived there."""
