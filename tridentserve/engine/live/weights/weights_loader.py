"""Brings the weights of a replica into a worker's memory, from a worker of the node or from its host copy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tridentserve.device import find_device
from tridentserve.engine.live.weights.host_copies import HostCopies, HostCopy
from tridentserve.engine.live.weights.layered_weights import NUM_SLOTS, LayeredLayout, LayeredWeights
from tridentserve.engine.live.weights.peer_weights import PeerWeights
from tridentserve.engine.options import Fetch
from tridentserve.errors import ConfigError
from tridentserve.pipelines import weights
from tridentserve.pipelines.base import PipelineAdapter
from tridentserve.plans import Replica
from tridentserve.protocols import LoadSource
from tridentserve.weights_share import WHOLE, WeightsShare


@dataclass(frozen=True, slots=True)
class OpenedWeights:
    """The weights of a replica that can be loaded."""

    copy: HostCopy
    source: LoadSource
    """`host` when the copy existed already, else `disk`."""
    seconds: float
    """Seconds that it took to find or make it."""
    layout: LayeredLayout | None
    """The layout where the worker does not keep all weights."""

    @property
    def num_bytes(self) -> int:
        """Bytes that they take on the device."""
        return self.copy.layout.nbytes if self.layout is None else self.layout.num_bytes


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The weights of a replica in memory."""

    buffer: torch.Tensor
    """The bytes that the worker keeps for good, which may be sent to a peer that keeps the same."""
    num_bytes: int
    """Bytes that they take on the device."""
    source: LoadSource
    copy: HostCopy
    layered: LayeredWeights | None
    """The layers in turns, where the worker does not keep all weights."""

    @property
    def is_divided(self) -> bool:
        """True when workers have to put the layers together."""
        return self.layered is not None and not self.layered.is_streamed

    def attach(self, adapter: PipelineAdapter) -> None:
        """Give the models of an adapter these weights."""
        if self.layered is None:
            weights.attach(adapter, self.copy.tensors(self.buffer))
        else:
            self.layered.attach(adapter)

    def detach(self, adapter: PipelineAdapter) -> None:
        """Take the weights out of the models again."""
        if self.layered is None:
            weights.detach(adapter)
        else:
            self.layered.detach(adapter)


def resolve_fetch_mode(fetch: Fetch, device: torch.device) -> Fetch:
    """The mode that `auto` stands for on a device. Raises `ConfigError` for `mapped` on a device that is no CPU."""
    if fetch == "auto":
        return "mapped" if find_device(device).is_host else "peer"
    if fetch == "mapped" and not find_device(device).is_host:
        raise ConfigError("a GPU cannot use the pages of the host copy: choose `peer` or `host`")
    return fetch


class WeightsLoader:
    """Loads weights for one worker."""

    def __init__(
        self,
        host: HostCopies,
        device: torch.device,
        fetch: Fetch,
        block_bytes: int,
        peers: PeerWeights | None,
        shares: Mapping[Replica, WeightsShare],
        place: int,
    ) -> None:
        """`shares`: the stages of which the worker does not keep all weights; `place`: its number in its node, which
        says which shards it keeps."""
        self._host = host
        self.fetch = resolve_fetch_mode(fetch, device)
        """The place that weights come from."""
        self._block_bytes = block_bytes
        self._device = find_device(device)
        self._beside = self._device.make_side_thread("weights")
        self._peers = peers
        self._shares = shares
        self._place = place

    def open(self, replica: Replica) -> OpenedWeights:
        """Find or make the host copy of a replica, in the thread that computes."""
        was_made, start_s = self._host.has(replica), time.perf_counter()
        return self._describe(replica, self._host.get(replica), "host" if was_made else "disk", start_s)

    async def open_ahead(self, replica: Replica) -> OpenedWeights | None:
        """Map the host copy of a replica beside what computes; None where it has not been made."""
        opened: OpenedWeights | None = await self._beside(self._open_made, replica)
        return opened

    def _open_made(self, replica: Replica) -> OpenedWeights | None:
        start_s = time.perf_counter()
        copy = self._host.find(replica)
        return None if copy is None else self._describe(replica, copy, "host", start_s)

    def _describe(self, replica: Replica, copy: HostCopy, source: LoadSource, start_s: float) -> OpenedWeights:
        share = self._shares.get(replica, WHOLE)
        layout = None if share.is_whole else LayeredLayout(copy, share, self._place % share.unit)
        return OpenedWeights(copy, source, time.perf_counter() - start_s, layout)

    def is_mapped(self, opened: OpenedWeights) -> bool:
        """True where the pages of the host copy are the weights, so that nothing is loaded."""
        return opened.layout is None and self.fetch == "mapped"

    def find_shard(self, replica: Replica) -> int | None:
        """The number of the shards of a replica that this worker keeps: 0 of whole weights, None where it keeps no
        layer, so that no peer can have all from it."""
        share = self._shares.get(replica, WHOLE)
        return None if share.streamed else self._place % share.unit

    async def load(self, replica: Replica, opened: OpenedWeights) -> LoadedWeights:
        """Bring the weights into memory, beside what computes; `close` lets go of them."""
        layout = opened.layout
        if self.is_mapped(opened):
            return LoadedWeights(opened.copy.buffer, opened.num_bytes, opened.source, opened.copy, None)
        kept_bytes = opened.num_bytes if layout is None else layout.kept_bytes
        buffer, source = await self._fetch_bytes(replica, opened, kept_bytes)
        try:
            layered = None if layout is None else await self._beside(self._make_layered, layout, buffer)
        except BaseException:
            await self._deregister(buffer)
            raise
        return LoadedWeights(buffer, opened.num_bytes, source, opened.copy, layered)

    async def close(self, loaded: LoadedWeights) -> None:
        """Let go of memory that peers have written into or read from, and end what brings layers."""
        if loaded.layered is not None:
            await self._beside(loaded.layered.close)
        await self._deregister(loaded.buffer)

    async def _deregister(self, buffer: torch.Tensor) -> None:
        if self._peers is not None:
            await self._peers.deregister(buffer)

    async def _fetch_bytes(
        self, replica: Replica, opened: OpenedWeights, kept_bytes: int
    ) -> tuple[torch.Tensor, LoadSource]:
        buffer = await self._beside(self._allocate_buffer, kept_bytes)
        shard = self.find_shard(replica)
        if self.fetch == "peer" and self._peers is not None and shard is not None:
            try:
                if await self._peers.fetch_weights(replica, shard, buffer):
                    return buffer, "peer"
            except TimeoutError:  # a peer may still write into this buffer
                buffer = await self._beside(self._allocate_buffer, kept_bytes)
        await self._beside(self._fill, buffer, opened)
        return buffer, opened.source

    def _fill(self, buffer: torch.Tensor, opened: OpenedWeights) -> None:
        if opened.layout is None:
            copy_blocks(buffer, opened.copy.buffer, self._block_bytes)
        else:
            opened.layout.fill(buffer, lambda target, source: copy_blocks(target, source, self._block_bytes))

    def _make_layered(self, layout: LayeredLayout, kept: torch.Tensor) -> LayeredWeights:
        layered = LayeredWeights(layout, kept, [self._allocate_buffer(layout.slot_bytes) for _ in range(NUM_SLOTS)])
        layered.begin()
        return layered

    def _allocate_buffer(self, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)
        self._device.hand_over([buffer])
        # NIXL does not wait for what the stream still does with memory that has just been freed.
        self._device.wait_for_work()
        return buffer


def copy_blocks(target: torch.Tensor, source: torch.Tensor, block_bytes: int) -> None:
    """Copy bytes block by block, so that nothing of the size of a model is made on the way."""
    for offset in range(0, source.numel(), block_bytes):
        block = source[offset : offset + block_bytes]
        target[offset : offset + block.numel()].copy_(block, non_blocking=True)
    find_device(target.device).wait_for_work()
