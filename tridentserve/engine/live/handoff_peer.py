"""How handoff buffers name parcels and call one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from tridentserve.engine.live.parcel import Layout
from tridentserve.plans import WorkerId

Path = Literal["nixl", "host", "local"]


@dataclass(frozen=True, slots=True)
class HandoffKey:
    """Names the outputs of one plan. A request that starts again gets new plans, so no key is used twice."""

    request_id: str
    plan_id: int

    def note(self) -> bytes:
        return f"{self.plan_id}:{self.request_id}".encode()


@dataclass(frozen=True, slots=True)
class Transfer:
    """One handoff that took place, for the metrics."""

    path: Path
    nbytes: int
    seconds: float


class Peer(Protocol):
    """The handoff buffer of another worker, reached through its actor. `link_name`: the name of its NIXL agent, None
    when it has none."""

    @property
    def link_name(self) -> str | None: ...

    async def reserve(self, key: HandoffKey, producer: WorkerId, nbytes: int) -> int | None:
        """The offset of a slot in the peer's slab, or None when it has no room (or the parcel is there already)."""

    async def commit(self, key: HandoffKey, layout: Layout) -> None:
        """The bytes have been written into the reserved slot."""

    async def release(self, key: HandoffKey) -> None:
        """The bytes will not come: give the slot back."""

    async def deliver(self, key: HandoffKey, layout: Layout, buffer: torch.Tensor) -> None:
        """The bytes themselves, into the peer's host memory."""

    async def send(self, key: HandoffKey, to: WorkerId) -> None:
        """Push (again) what the peer has made to worker `to`; returns once it has arrived there."""
