"""Weights from worker to worker of one node, through NIXL: the one that has them writes them where they are wanted.

Only the event loop and the NIXL thread of the sender take part, so a plan that runs there continues. Whatever goes
wrong, the receiver has the host copy.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from tridentserve.engine.live.transport.nixl_link import TRANSFER_TIMEOUT_S, NixlLink, mark_exception_retrieved
from tridentserve.engine.live.transport.nixl_memory import Memory, locate_memory
from tridentserve.errors import HandoffError
from tridentserve.plans import Replica, WorkerId

logger = logging.getLogger(__name__)

# A peer that has not said by now whether it has a replica is passed over.
_OFFER_TIMEOUT_S = 2.0
# Far below what any link of one node does.
_SLOWEST_BYTES_PER_S = 200e6


def choose_timeout_s(nbytes: int) -> float:
    """The longest time, in seconds, that the move of a replica from worker to worker may take."""
    return TRANSFER_TIMEOUT_S + nbytes / _SLOWEST_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class WeightOrder:
    """A worker asks another one to write a replica's packed weights into its memory."""

    replica: Replica
    link_name: str
    """Name of the asking worker's NIXL agent."""
    metadata: bytes
    """Description of that agent with the target memory, as NIXL makes and reads it."""
    target: Memory
    note: bytes
    """NIXL delivers this note with the last block."""


class WeightPeer(Protocol):
    """Another worker. `link_name`: the name of its NIXL agent, None when it has none."""

    @property
    def link_name(self) -> str | None: ...

    @property
    def node_id(self) -> str: ...

    async def count_readers(self, replica: Replica, shard: int) -> int | None:
        """Number of workers that the peer is sending the replica to; None when the peer does not hold it, or other
        shards of it."""

    async def send_weights(self, order: WeightOrder) -> None:
        """Have the peer carry out the order; returns when all is written. Raises `HandoffError`."""


class PeerWeights:
    """Moves weights between one worker and its peers, in both directions."""

    def __init__(self, link: NixlLink, peers: Mapping[WorkerId, WeightPeer], node_id: str, block_bytes: int) -> None:
        self._link = link
        self._peers = peers
        self._node_id = node_id
        self._block_bytes = block_bytes
        self._numbers = itertools.count()
        self._aside: set[asyncio.Future[None]] = set()

    async def fetch_weights(self, replica: Replica, shard: int, buffer: torch.Tensor) -> bool:
        """Fill `buffer` from a peer that keeps the same shards, the least busy first. False when no peer of this node
        could do it.

        Raises `TimeoutError` when a peer neither did it nor gave up: the buffer must not be used then. It stays alive
        until the peer has let go of it."""
        offers = await self._list_offers(replica, shard)
        if not offers:
            return False
        try:
            target, metadata = await asyncio.wrap_future(self._link.register(buffer))
        except Exception as error:  # NIXL raises classes of its own
            logger.warning("NIXL does not take memory for %s: %r", replica, error)
            return False
        timeout_s = choose_timeout_s(buffer.nbytes)
        for peer in offers:
            note = f"weights {replica.model} {replica.stage.value} {next(self._numbers)}".encode()
            arrived = asyncio.wrap_future(self._link.expect(note, timeout_s)[0])
            arrived.add_done_callback(mark_exception_retrieved)
            order = WeightOrder(replica, self._link.address.name, metadata, target, note)
            sending = asyncio.ensure_future(peer.send_weights(order))
            try:
                await asyncio.wait_for(asyncio.shield(sending), timeout_s)
                await arrived
                return True
            except HandoffError as error:
                logger.warning("%s did not come from a peer: %s", replica, error)
            except TimeoutError:
                self._set_aside(sending, buffer, note)
                raise
            finally:
                if sending not in self._aside:
                    self._link.stop_expecting(note)
        await self.deregister(buffer)
        return False

    async def _list_offers(self, replica: Replica, shard: int) -> list[WeightPeer]:
        near = [peer for peer in self._peers.values() if peer.link_name is not None and peer.node_id == self._node_id]
        asked = (asyncio.wait_for(peer.count_readers(replica, shard), _OFFER_TIMEOUT_S) for peer in near)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        offers = [(busy, index) for index, busy in enumerate(answers) if isinstance(busy, int)]
        return [near[index] for _, index in sorted(offers)]

    def _set_aside(self, sending: asyncio.Future[None], buffer: torch.Tensor, note: bytes) -> None:
        """Keep memory that may still be written into."""

        def ended(future: asyncio.Future[None]) -> None:
            mark_exception_retrieved(future)
            self._aside.discard(future)
            self._link.stop_expecting(note)
            kept = [buffer]
            self._link.deregister(locate_memory(buffer)).add_done_callback(lambda _: kept.clear())

        self._aside.add(sending)
        sending.add_done_callback(ended)

    async def write_weights(self, order: WeightOrder, buffer: torch.Tensor) -> None:
        """Carry out a peer's order from `buffer`, which must live until this returns. Raises `HandoffError`."""
        source, _ = await asyncio.wrap_future(self._link.register(buffer))
        if source.nbytes != order.target.nbytes:
            raise HandoffError(f"{order.replica} has {source.nbytes} bytes here, {order.target.nbytes} are wanted")
        await asyncio.wrap_future(self._link.learn(order.metadata))
        for offset in range(0, source.nbytes, self._block_bytes):
            nbytes = min(self._block_bytes, source.nbytes - offset)
            note = order.note if offset + nbytes == source.nbytes else b""
            block, target = source.part(offset, nbytes), order.target.part(offset, nbytes)
            ended, settled = self._link.write_memory(order.link_name, block, target, note)
            try:
                await asyncio.wrap_future(ended)
            finally:
                await asyncio.wrap_future(settled)

    async def deregister(self, buffer: torch.Tensor) -> None:
        """End the part of a buffer in NIXL's writes: it may be freed on return."""
        await asyncio.wrap_future(self._link.deregister(locate_memory(buffer)))
