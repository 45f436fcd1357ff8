"""A peer's handoff buffer and its weights, called through its Ray actor. Errors of the call become `HandoffError`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import torch
from ray.actor import ActorHandle
from ray.exceptions import RayError

from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.transport.parcel import ParcelLayout
from tridentserve.engine.live.weights.peer_weights import WeightOrder
from tridentserve.errors import HandoffError
from tridentserve.plans import Replica, WorkerId

T = TypeVar("T")


class RayPeer:
    """See `handoff.peer.Peer` and `weights.peer_weights.WeightPeer`."""

    def __init__(self, actor: ActorHandle[Any], link_name: str | None, node_id: str) -> None:
        self._actor = actor
        self._link_name = link_name
        self.node_id = node_id

    @property
    def link_name(self) -> str | None:
        return self._link_name

    async def reserve_slot(self, key: HandoffKey, producer: WorkerId, layout: ParcelLayout) -> int | None:
        return await _wait_for_answer(self._actor.reserve_slot.remote(key, producer, layout))

    async def release_slot(self, key: HandoffKey) -> None:
        await _wait_for_answer(self._actor.release_slot.remote(key))

    async def deliver_parcel(self, key: HandoffKey, layout: ParcelLayout, buffer: torch.Tensor) -> None:
        # Ray sends a numpy array without a copy, and pickles a torch tensor.
        await _wait_for_answer(self._actor.deliver_parcel.remote(key, layout, buffer.numpy()))

    async def keep_checkpoint(self, key: HandoffKey) -> None:
        await _wait_for_answer(self._actor.keep_checkpoint.remote(key))

    async def send_output(self, key: HandoffKey, to: WorkerId) -> None:
        await _wait_for_answer(self._actor.send_output.remote(key, to))

    async def count_readers(self, replica: Replica) -> int | None:
        return await _wait_for_answer(self._actor.count_readers.remote(replica))

    async def send_weights(self, order: WeightOrder) -> None:
        await _wait_for_answer(self._actor.send_weights.remote(order))


async def _wait_for_answer(reference: Awaitable[T]) -> T:
    try:
        return await reference
    except RayError as error:
        raise HandoffError(f"a peer did not answer: {error}") from error
