"""How handoff buffers name parcels and call one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from tridentserve.engine.live.transport.parcel import ParcelLayout
from tridentserve.plans import WorkerId

Path = Literal["nixl", "host", "local"]


@dataclass(frozen=True, slots=True)
class HandoffKey:
    """Names the output of one plan for a request. A request that starts again gets new plans, so no key is used twice.
    `step`: not the output, but the copy of the state that the plan made when so many of the request's steps were done.
    """

    request_id: str
    plan_id: int
    step: int | None = None

    def note(self) -> bytes:
        return f"{self.plan_id}:{'' if self.step is None else self.step}:{self.request_id}".encode()


@dataclass(frozen=True, slots=True)
class CompletedTransfer:
    """One handoff that took place, for the metrics."""

    path: Path
    nbytes: int
    seconds: float


class Peer(Protocol):
    """The handoff buffer of another worker, reached through its actor. `link_name`: the name of its NIXL agent, None
    when it has none."""

    @property
    def link_name(self) -> str | None: ...

    async def reserve_slot(self, key: HandoffKey, producer: WorkerId, layout: ParcelLayout) -> int | None:
        """The offset of a slot in the peer's slab, or None when it has no room (or the parcel is there already). The
        peer knows by the write's note when the bytes are there."""

    async def release_slot(self, key: HandoffKey) -> None:
        """The bytes will not come: give the slot back."""

    async def deliver_parcel(self, key: HandoffKey, layout: ParcelLayout, buffer: torch.Tensor) -> None:
        """The bytes themselves, into the peer's host memory."""

    async def keep_checkpoint(self, key: HandoffKey) -> None:
        """What has arrived is a copy of a running request's state: keep it in host memory."""

    async def send_output(self, key: HandoffKey, to: WorkerId) -> None:
        """Push (again) what the peer has made to worker `to`; returns once it has arrived there."""
