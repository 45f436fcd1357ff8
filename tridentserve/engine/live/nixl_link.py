"""One-sided writes from this worker's slab into another's, through NIXL (UCX underneath; shared memory on one node).

An agent is not thread-safe: all calls of one link run in its one thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from tridentserve.engine.live.messages import LinkAddress
from tridentserve.errors import HandoffError

# Well above any transfer between live peers; a dead peer is an error of NIXL's within a second.
TRANSFER_TIMEOUT_S = 30.0
_POLL_S = 0.0002

T = TypeVar("T")


class TransferStuckError(HandoffError):
    """A write has neither ended nor failed in time: its memory on both sides must not be used again."""


class NixlLink:
    """The NIXL agent of one worker and its registered slab (a contiguous uint8 tensor)."""

    def __init__(self, name: str, slab: torch.Tensor) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nixl")
        self._slab = slab
        self._memory = "VRAM" if slab.is_cuda else "DRAM"
        self._device_id = slab.get_device() if slab.is_cuda else 0
        self._peers: dict[str, LinkAddress] = {}
        self._arrived: set[bytes] = set()
        self._agent: Any = self._thread.submit(self._start, name).result()
        metadata = self._thread.submit(self._agent.get_agent_metadata).result()
        self.address = LinkAddress(name, metadata, slab.data_ptr(), self._device_id)

    def _start(self, name: str) -> Any:
        # Imported here: it takes over a second, and a machine where UCX cannot start must still serve.
        from nixl._api import nixl_agent, nixl_agent_config

        agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        region = (self._slab.data_ptr(), self._slab.numel(), self._device_id, "")
        agent.register_memory([region], mem_type=self._memory)
        return agent

    async def add_peer(self, address: LinkAddress) -> None:
        await self._call(self._agent.add_remote_agent, address.metadata)
        self._peers[address.name] = address

    async def write(self, peer: str, local_offset: int, remote_offset: int, nbytes: int, note: bytes) -> None:
        """Copy bytes of the slab into the peer's, which gets `note` once they are there.

        Raises `HandoffError` when the peer is gone, `TransferStuckError` when the bytes do not move."""
        await self._call(self._write, self._peers[peer], local_offset, remote_offset, nbytes, note)

    def _write(self, peer: LinkAddress, local_offset: int, remote_offset: int, nbytes: int, note: bytes) -> None:
        source = (self._slab.data_ptr() + local_offset, nbytes, self._device_id)
        target = (peer.base + remote_offset, nbytes, peer.device_id)
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs([source], mem_type=self._memory),
                agent.get_xfer_descs([target], mem_type=self._memory),
                peer.name,
                note,
            )
            state = agent.transfer(handle)
            deadline_s = time.monotonic() + TRANSFER_TIMEOUT_S
            while state == "PROC" and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                state = agent.check_xfer_state(handle)
        except Exception as error:
            raise HandoffError(f"NIXL could not write {nbytes} bytes to {peer.name}: {error}") from error
        if state == "PROC":
            raise TransferStuckError(
                f"NIXL has not written {nbytes} bytes to {peer.name} in {TRANSFER_TIMEOUT_S:.0f} s"
            )
        agent.release_xfer_handle(handle)

    async def wait_for(self, note: bytes) -> None:
        """Return once a peer's write with this note has arrived; raises `HandoffError` when it does not in time."""
        await self._call(self._wait_for, note)

    def _wait_for(self, note: bytes) -> None:
        deadline_s = time.monotonic() + TRANSFER_TIMEOUT_S
        while note not in self._arrived:
            for notes in self._agent.get_new_notifs().values():
                self._arrived.update(notes)
            if time.monotonic() > deadline_s:
                raise HandoffError(f"no notification {note!r} from NIXL within {TRANSFER_TIMEOUT_S:.0f} s")
            if note not in self._arrived:
                time.sleep(_POLL_S)
        self._arrived.discard(note)

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args))
