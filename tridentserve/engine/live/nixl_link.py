"""One-sided writes from this worker's memory into another's, through NIXL (UCX underneath; shared memory on one node).

Outputs go from slab to slab; weights go from and to memory that is registered while it holds them.

An agent is not thread-safe: all calls of one link are made in its one thread. NIXL's own progress thread stays off: it
spins, and takes a whole core from the model (measured: 1.99 s of CPU per 2 s idle). Instead this thread polls while a
transfer is under way on either side, and sleeps otherwise.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from tridentserve.engine.live.messages import LinkAddress
from tridentserve.errors import HandoffError

# Well above any transfer between live peers; a dead peer is an error of NIXL's within a second.
TRANSFER_TIMEOUT_S = 30.0
_POLL_S = 0.0002


class TransferStuckError(HandoffError):
    """A write has neither ended nor failed in time: its memory on both sides must not be used again."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A run of bytes in registered memory of a process. `device_id` is 0 for host memory."""

    address: int
    nbytes: int
    device_id: int

    def part(self, offset: int, nbytes: int) -> Memory:
        return Memory(self.address + offset, nbytes, self.device_id)


@dataclass(slots=True)
class _Transfer:
    """Something that is waited for, with what to say when it does not come."""

    what: str
    ended: Future[None] = field(default_factory=Future)
    # Set later than `ended` when that failed for lack of time: the memory may be used again from then on.
    settled: Future[None] = field(default_factory=Future)
    deadline_s: float = field(default_factory=lambda: time.monotonic() + TRANSFER_TIMEOUT_S)

    def end(self, error: HandoffError | None = None) -> None:
        if self.ended.done():  # given up by the one who waited
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class NixlLink:
    """The NIXL agent of one worker and its registered slab (a contiguous uint8 tensor). Other memory that takes part is
    on the slab's device."""

    def __init__(self, name: str, slab: torch.Tensor) -> None:
        """Raises whatever NIXL or UCX raise when they cannot start."""
        self._slab = slab
        self._kind = "VRAM" if slab.is_cuda else "DRAM"
        self._own = memory_of(slab)
        self._registered: dict[Memory, Any] = {}
        self._peers: dict[str, LinkAddress] = {}
        self._writes: dict[Any, _Transfer] = {}  # by NIXL's handle
        self._expected: dict[bytes, _Transfer] = {}
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()
        self._agent: Any = self._call(lambda: self._start(name)).result()
        metadata = self._call(self._agent.get_agent_metadata).result()
        self.address = LinkAddress(name, metadata, self._own.address, self._own.device_id)

    def add_peer(self, address: LinkAddress) -> Future[None]:
        """Get to know a peer. The future fails when NIXL refuses its metadata."""

        def add() -> None:
            self._agent.add_remote_agent(address.metadata)
            self._peers[address.name] = address

        return self._call(add)

    def remove_peer(self, name: str) -> None:
        """Forget a peer whose process has ended."""
        if self._peers.pop(name, None) is not None:
            self._call(lambda: self._agent.remove_remote_agent(name))

    def register(self, tensor: torch.Tensor) -> Future[tuple[Memory, bytes]]:
        """Let a contiguous tensor take part in writes; what peers need for writing into it comes with it. The tensor
        must live until `deregister` has ended."""
        memory = memory_of(tensor)

        def register() -> tuple[Memory, bytes]:
            if memory not in self._registered:
                region = (memory.address, memory.nbytes, memory.device_id, "")
                self._registered[memory] = self._agent.register_memory([region], mem_type=self._kind)
            return memory, self._agent.get_partial_agent_metadata(self._registered[memory], False, [])

        return self._call(register)

    def deregister(self, memory: Memory) -> Future[None]:
        """The memory takes part no more; nothing may be under way there. It need not be registered."""

        def deregister() -> None:
            if memory in self._registered:
                self._agent.deregister_memory(self._registered.pop(memory))

        return self._call(deregister)

    def learn(self, metadata: bytes) -> Future[None]:
        """Take in what a known peer says of memory that it has registered since."""
        return self._call(lambda: self._agent.add_remote_agent(metadata))

    def write(
        self, peer: str, local_offset: int, remote_offset: int, nbytes: int, note: bytes
    ) -> tuple[Future[None], Future[None]]:
        """Copy bytes of the slab into the peer's, which gets `note` once they are there.

        The first future fails with `HandoffError` when the peer is gone, and with `TransferStuckError` when the bytes
        do not move in time; then the second is done once NIXL has let go of the memory on both sides."""
        address = self._peers.get(peer)
        target = Memory(address.base + remote_offset, nbytes, address.device_id) if address else None
        return self.write_memory(peer, self._own.part(local_offset, nbytes), target, note)

    def write_memory(
        self, peer: str, source: Memory, target: Memory | None, note: bytes
    ) -> tuple[Future[None], Future[None]]:
        """As `write`, between registered memory here and as much of the peer's (None: the peer is not known)."""
        transfer = _Transfer(f"writing {source.nbytes} bytes to {peer}")
        self._call(lambda: self._begin_write(transfer, peer, source, target, note))
        return transfer.ended, transfer.settled

    def expect(self, note: bytes, timeout_s: float = TRANSFER_TIMEOUT_S) -> Future[None]:
        """Done once a peer's write with this note has arrived. To be called before that write begins: the first one
        between two agents needs both to make progress. The future fails with `HandoffError` when it does not come."""
        transfer = _Transfer(f"receiving {note!r}", deadline_s=time.monotonic() + timeout_s)
        self._call(lambda: self._expected.__setitem__(note, transfer))
        return transfer.ended

    def stop_expecting(self, note: bytes) -> None:
        """The write will not come: who waits for it gets a `HandoffError`."""
        self._call(lambda: self._give_up(note))

    def close(self) -> None:
        """End the thread and the agent."""
        self._calls.put(None)
        self._thread.join()
        self._agent = None

    # In the link's thread.

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)

        self._calls.put(run)
        return answer

    def _run(self) -> None:
        while True:
            busy = bool(self._writes or self._expected)
            try:
                call = self._calls.get(timeout=_POLL_S) if busy else self._calls.get()
            except queue.Empty:
                try:
                    self._progress()
                except Exception as error:  # NIXL raises classes of its own; without this thread nobody would hear
                    self._fail_all(error)
                continue
            if call is None:
                return
            call()

    def _start(self, name: str) -> Any:
        # Imported here: it takes over a second, and a machine where UCX cannot start must still serve.
        from nixl._api import nixl_agent, nixl_agent_config

        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        region = (self._own.address, self._own.nbytes, self._own.device_id, "")
        agent.register_memory([region], mem_type=self._kind)
        return agent

    def _begin_write(self, transfer: _Transfer, peer: str, source: Memory, target: Memory | None, note: bytes) -> None:
        try:
            if target is None or peer not in self._peers:
                raise HandoffError(f"{peer} is gone")
            handle = self._agent.initialize_xfer(
                "WRITE", self._descriptors(source), self._descriptors(target), peer, note
            )
            self._agent.transfer(handle)
            self._writes[handle] = transfer
        except Exception as error:  # NIXL raises classes of its own, UCX what it likes
            transfer.end(HandoffError(f"NIXL failed {transfer.what}: {error!r}"))
            transfer.settled.set_result(None)

    def _descriptors(self, memory: Memory) -> Any:
        region = (memory.address, memory.nbytes, memory.device_id)
        return self._agent.get_xfer_descs([region], mem_type=self._kind)

    def _give_up(self, note: bytes) -> None:
        transfer = self._expected.pop(note, None)
        if transfer is not None:
            transfer.end(HandoffError(f"given up {transfer.what}"))

    def _fail_all(self, error: Exception) -> None:
        for transfer in (*self._writes.values(), *self._expected.values()):
            transfer.end(HandoffError(f"NIXL failed {transfer.what}: {error!r}"))
        self._expected.clear()

    def _progress(self) -> None:
        """One look at all that is under way."""
        for notes in self._agent.get_new_notifs().values():
            for note in notes:
                if (transfer := self._expected.pop(note, None)) is not None:
                    transfer.end()
        for handle, transfer in list(self._writes.items()):
            self._check_write(handle, transfer)
        now_s = time.monotonic()
        for note, transfer in list(self._expected.items()):
            if now_s > transfer.deadline_s:
                del self._expected[note]
                transfer.end(HandoffError(f"NIXL: nothing came in time, {transfer.what}"))

    def _check_write(self, handle: Any, transfer: _Transfer) -> None:
        error: HandoffError | None = None
        try:
            state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                self._agent.release_xfer_handle(handle)
        except Exception as raised:
            state, error = "ERR", HandoffError(f"NIXL failed {transfer.what}: {raised!r}")
        if state == "PROC":
            if time.monotonic() > transfer.deadline_s:
                # Kept under watch: the memory must not be given to others before NIXL has let go of it.
                transfer.end(TransferStuckError(f"NIXL did not end {transfer.what} in {TRANSFER_TIMEOUT_S:.0f} s"))
            return
        del self._writes[handle]
        transfer.end(error if state == "DONE" or error else HandoffError(f"NIXL failed {transfer.what}: {state}"))
        transfer.settled.set_result(None)


def memory_of(tensor: torch.Tensor) -> Memory:
    """Where a contiguous tensor lies."""
    return Memory(tensor.data_ptr(), tensor.nbytes, tensor.get_device() if tensor.is_cuda else 0)
