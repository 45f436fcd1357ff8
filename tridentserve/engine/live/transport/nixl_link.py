"""One-sided writes from this worker's memory into another's, through NIXL (UCX underneath; shared memory on one node).

Outputs go from slab to slab; weights go from and to memory that is registered while it holds them.

An agent is not thread-safe: all calls of one link are made in its one thread. NIXL's own progress thread stays off: it
spins, and takes a whole core from the model (measured: 1.99 s of CPU per 2 s idle). Instead this thread polls while a
transfer is under way on either side, and sleeps otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from tridentserve.device import find_device
from tridentserve.engine.live.messages import LinkAddress
from tridentserve.engine.live.transport.nixl_memory import Memory, RegisteredMemory, locate_memory
from tridentserve.errors import HandoffError

logger = logging.getLogger(__name__)

# Well above any transfer between live peers; a dead peer is an error of NIXL's within a second.
TRANSFER_TIMEOUT_S = 30.0
_POLL_S = 0.0002
# For what has taken too long, and only keeps memory from being used again.
_LATE_POLL_S = 0.02


class TransferStuckError(HandoffError):
    """A write has neither ended nor failed in time: its memory on both sides must not be used again."""


@dataclass(slots=True)
class _PendingTransfer:
    """A write of this agent, or of a peer, that has not ended. A caller that waits for it cannot cancel it."""

    what: str
    """Description for error messages."""
    ended: Future[None] = field(default_factory=Future)
    settled: Future[None] = field(default_factory=Future)
    """Set later than `ended` when that failed for lack of time: the memory may be used again from then on."""
    held: list[Memory] = field(default_factory=list)
    """Memory that is registered until the write has settled."""
    deadline_s: float = field(default_factory=lambda: time.monotonic() + TRANSFER_TIMEOUT_S)

    def __post_init__(self) -> None:
        for future in (self.ended, self.settled):
            future.set_running_or_notify_cancel()

    def end(self, error: HandoffError | None = None) -> None:
        if self.ended.done():  # the caller has given it up
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def mark_exception_retrieved(future: asyncio.Future[None]) -> None:
    """Keep asyncio from logging the failure of a future that is handled elsewhere."""
    if not future.cancelled():
        future.exception()


class NixlLink:
    """The NIXL agent of one worker and its registered slab (a contiguous uint8 tensor). Other memory that takes part is
    on the slab's device."""

    def __init__(self, name: str, slab: torch.Tensor) -> None:
        """Raises whatever NIXL or UCX raise when they cannot start."""
        self._slab = slab
        self._kind = find_device(slab.device).nixl_kind
        self._own = locate_memory(slab)
        self._lasting: dict[Memory, Any] = {}
        self._peers: dict[str, LinkAddress] = {}
        self._writes: dict[Any, _PendingTransfer] = {}  # by NIXL's handle
        self._expected: dict[bytes, _PendingTransfer] = {}
        # Not a SimpleQueue: see `core_thread`.
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()
        self._agent: Any = self._call(lambda: self._start(name)).result()
        self._memory = RegisteredMemory(self._agent, self._kind)
        self._call(lambda: self._memory.hold(self._own)).result()
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
        memory = locate_memory(tensor)

        def register() -> tuple[Memory, bytes]:
            if memory not in self._lasting:
                self._lasting[memory] = self._memory.hold(memory)
            return memory, self._agent.get_partial_agent_metadata(self._lasting[memory], False, [])

        return self._call(register)

    def deregister(self, memory: Memory) -> Future[None]:
        """The memory takes part no more; nothing may be under way there. It need not be registered."""

        def deregister() -> None:
            if self._lasting.pop(memory, None) is not None:
                self._memory.let_go(memory)

        return self._call(deregister)

    def learn(self, metadata: bytes) -> Future[None]:
        """Take in what a known peer says of memory that it has registered since."""
        return self._call(lambda: self._agent.add_remote_agent(metadata))

    def write(
        self, peer: str, parts: Sequence[tuple[Memory, int]], remote_offset: int, note: bytes
    ) -> tuple[Future[None], Future[None]]:
        """Copy memory into the peer's slab, each part to its offset from `remote_offset` on; the peer gets `note` once
        all is there. Memory outside this slab is registered meanwhile, and must live until the second future is done.

        The first future fails with `HandoffError` when the peer is gone, and with `TransferStuckError` when the bytes
        do not move in time; then the second is done once NIXL has let go of the memory on both sides."""
        address = self._peers.get(peer)
        sources = [memory for memory, _ in parts]
        targets: list[Memory] = []
        if address is not None:
            targets = [
                Memory(address.base + remote_offset + offset, memory.nbytes, address.device_id)
                for memory, offset in parts
            ]
        return self._write(peer, sources, targets, note, [memory for memory in sources if not self._own.holds(memory)])

    def write_memory(
        self, peer: str, source: Memory, target: Memory | None, note: bytes
    ) -> tuple[Future[None], Future[None]]:
        """Like `write`, from registered memory here to as much of the peer's (None: the peer is not known)."""
        return self._write(peer, [source], [target] if target is not None else [], note, [])

    def _write(
        self, peer: str, sources: list[Memory], targets: list[Memory], note: bytes, to_register: list[Memory]
    ) -> tuple[Future[None], Future[None]]:
        transfer = _PendingTransfer(f"writing {sum(memory.nbytes for memory in sources)} bytes to {peer}")
        self._call(lambda: self._begin_write(transfer, peer, sources, targets, note, to_register))
        return transfer.ended, transfer.settled

    def expect(self, note: bytes, timeout_s: float = TRANSFER_TIMEOUT_S) -> tuple[Future[None], Future[None]]:
        """Wait for a peer's write with this note. Must be called before that write begins: the first one between two
        agents needs both to make progress, which this one does until the note comes, however late, or
        `stop_expecting`.

        The first future is done when all has arrived, and fails with `HandoffError` when it does not come in time; the
        second is done when nothing is written any more."""
        transfer = _PendingTransfer(f"receiving {note!r}", deadline_s=time.monotonic() + timeout_s)
        self._call(lambda: self._expected.__setitem__(note, transfer))
        return transfer.ended, transfer.settled

    def stop_expecting(self, note: bytes) -> None:
        """The write has ended or will not come: a caller that still waits for it gets a `HandoffError`."""
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
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)

        self._calls.put(run)
        return answer

    def _run(self) -> None:
        find_device(self._slab.device).enter_thread()
        while True:
            try:
                call = self._calls.get(timeout=self._choose_pause_s())
            except queue.Empty:
                try:
                    self._progress()
                except Exception as error:  # NIXL raises classes of its own; without this thread all callers would wait
                    self._fail_all(error)
                continue
            if call is None:
                return
            call()

    def _choose_pause_s(self) -> float | None:
        """The seconds until the next look at what is under way; None when nothing is."""
        if not self._writes and not self._expected:
            return None
        under_way = itertools.chain(self._writes.values(), self._expected.values())
        return _LATE_POLL_S if all(transfer.ended.done() for transfer in under_way) else _POLL_S

    @staticmethod
    def _start(name: str) -> Any:
        # Imported here: it takes over a second, and a machine where UCX cannot start must still serve.
        from nixl._api import nixl_agent, nixl_agent_config

        return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))

    def _begin_write(
        self,
        transfer: _PendingTransfer,
        peer: str,
        sources: list[Memory],
        targets: list[Memory],
        note: bytes,
        to_register: list[Memory],
    ) -> None:
        try:
            if not targets or peer not in self._peers:
                raise HandoffError(f"{peer} is gone")
            for memory in to_register:
                self._memory.hold(memory)
                transfer.held.append(memory)
            handle = self._agent.initialize_xfer(
                "WRITE", self._memory.make_descriptors(sources), self._memory.make_descriptors(targets), peer, note
            )
            self._agent.transfer(handle)
            self._writes[handle] = transfer
        except Exception as error:  # NIXL raises classes of its own, UCX what it likes
            transfer.end(HandoffError(f"NIXL failed {transfer.what}: {error!r}"))
            self._settle(transfer)

    def _settle(self, transfer: _PendingTransfer) -> None:
        """NIXL has let go of the memory of a write."""
        for memory in transfer.held:
            try:
                self._memory.let_go(memory)
            except Exception as error:  # it stays registered, which does no harm
                logger.warning("NIXL did not deregister memory: %r", error)
        transfer.settled.set_result(None)

    def _give_up(self, note: bytes) -> None:
        transfer = self._expected.pop(note, None)
        if transfer is not None:
            transfer.end(HandoffError(f"given up {transfer.what}"))
            transfer.settled.set_result(None)

    def _fail_all(self, error: Exception) -> None:
        """NIXL has failed without saying for which transfer. Bytes may still move: all stays under watch."""
        for transfer in self._writes.values():
            transfer.end(TransferStuckError(f"NIXL failed {transfer.what}: {error!r}"))
        for transfer in self._expected.values():
            transfer.end(HandoffError(f"NIXL failed {transfer.what}: {error!r}"))

    def _progress(self) -> None:
        """One look at all that is under way."""
        for notes in self._agent.get_new_notifs().values():
            for note in notes:
                if (transfer := self._expected.pop(note, None)) is not None:
                    transfer.end()
                    transfer.settled.set_result(None)
        for handle, transfer in list(self._writes.items()):
            self._check_write(handle, transfer)
        now_s = time.monotonic()
        for transfer in self._expected.values():
            if now_s > transfer.deadline_s:
                transfer.end(HandoffError(f"NIXL: nothing came in time, {transfer.what}"))

    def _check_write(self, handle: Any, transfer: _PendingTransfer) -> None:
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
        self._settle(transfer)
