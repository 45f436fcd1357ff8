"""A peer's handoff buffer and its weights, called through its Ray actor. Errors of the call become `HandoffError`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import torch
from ray.actor import ActorHandle
from ray.exceptions import RayError

from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.transport.parcel import Layout
from tridentserve.engine.live.weights.peer_weights import WeightOrder
from tridentserve.errors import HandoffError
from tridentserve.plans import Replica, WorkerId

T = TypeVar("T")


class RayPeer:
    """See `handoff_peer.Peer` and `peer_weights.WeightPeer`."""

    def __init__(self, handle: ActorHandle[Any], link_name: str | None, node_id: str) -> None:
        self._handle = handle
        self._link_name = link_name
        self.node_id = node_id

    @property
    def link_name(self) -> str | None:
        return self._link_name

    async def reserve(self, key: HandoffKey, producer: WorkerId, layout: Layout) -> int | None:
        return await _answer(self._handle.reserve.remote(key, producer, layout))

    async def release(self, key: HandoffKey) -> None:
        await _answer(self._handle.release.remote(key))

    async def deliver(self, key: HandoffKey, layout: Layout, buffer: torch.Tensor) -> None:
        # numpy travels beside the pickle without a copy; a torch tensor does not
        await _answer(self._handle.deliver.remote(key, layout, buffer.numpy()))

    async def stow(self, key: HandoffKey) -> None:
        await _answer(self._handle.stow.remote(key))

    async def send(self, key: HandoffKey, to: WorkerId) -> None:
        await _answer(self._handle.send.remote(key, to))

    async def offers(self, replica: Replica) -> int | None:
        return await _answer(self._handle.offers.remote(replica))

    async def send_weights(self, order: WeightOrder) -> None:
        await _answer(self._handle.send_weights.remote(order))


async def _answer(reference: Awaitable[T]) -> T:
    try:
        return await reference
    except RayError as error:
        raise HandoffError(f"a peer did not answer: {error}") from error
