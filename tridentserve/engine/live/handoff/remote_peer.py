"""A peer's handoff buffer and its weights, called over a channel. Errors of a call become `HandoffError`."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from ray.actor import ActorHandle
from ray.exceptions import RayError

from tridentserve.engine.live.channels.channel import ChannelAddress, ChannelError
from tridentserve.engine.live.channels.opening import LazyChannel, connect
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.transport.parcel import ParcelLayout
from tridentserve.engine.live.weights.peer_weights import WeightOrder
from tridentserve.errors import HandoffError
from tridentserve.plans import Replica, WorkerId

T = TypeVar("T")


class RemotePeer:
    """See `handoff.peer.Peer` and `weights.peer_weights.WeightPeer`."""

    def __init__(
        self,
        actor: ActorHandle[Any],
        channel: ChannelAddress,
        link_name: str | None,
        node_id: str,
        shares_memory: bool = False,
    ) -> None:
        """`channel` is where the peer takes calls; a connection is made when one is needed."""
        self._actor = actor
        self._channel = LazyChannel(partial(connect, channel))
        self._link_name = link_name
        self.node_id = node_id
        self._shares_memory = shares_memory

    @property
    def link_name(self) -> str | None:
        return self._link_name

    @property
    def shares_memory(self) -> bool:
        return self._shares_memory

    async def reserve_slot(self, key: HandoffKey, producer: WorkerId, layout: ParcelLayout) -> int | None:
        answer: int | None = await self._ask("reserve_slot", key, producer, layout)
        return answer

    async def release_slot(self, key: HandoffKey) -> None:
        await self._ask("release_slot", key)

    async def deliver_parcel(self, key: HandoffKey, layout: ParcelLayout, buffer: torch.Tensor) -> None:
        # The bytes go through Ray's object store, which a receiver on the same node maps. Ray sends a numpy array
        # without a copy, and pickles a torch tensor.
        await _wait_for_answer(self._actor.deliver_parcel.remote(key, layout, buffer.numpy()))

    async def deliver_file(self, key: HandoffKey, layout: ParcelLayout, path: Path) -> None:
        await self._ask("deliver_file", key, layout, path)

    async def keep_checkpoint(self, key: HandoffKey) -> None:
        await self._ask("keep_checkpoint", key)

    async def send_output(self, key: HandoffKey, to: WorkerId) -> None:
        await self._ask("send_output", key, to)

    async def count_readers(self, replica: Replica, shard: int) -> int | None:
        answer: int | None = await self._ask("count_readers", replica, shard)
        return answer

    async def send_weights(self, order: WeightOrder) -> None:
        await self._ask("send_weights", order)

    def close(self) -> None:
        """The peer is gone, or this worker is."""
        self._channel.close()

    async def _ask(self, name: str, *args: object) -> Any:
        try:
            channel = await self._channel.get()
            return await channel.ask(name, *args)
        except ChannelError as error:
            raise HandoffError(f"a peer did not answer: {error}") from error


async def _wait_for_answer(reference: Awaitable[T]) -> T:
    try:
        return await reference
    except RayError as error:
        raise HandoffError(f"a peer did not answer: {error}") from error
