"""Process groups of any set of workers, made at any time from a store and a name, without a global world.

`torch.distributed.init_process_group` is never called, so workers can join and leave, and one failed group harms no
other. Groups use gloo on the CPU and NCCL on CUDA. No plan crosses a node, so gloo stays on the loopback device.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # public names that torch does not export for mypy
    PrefixStore,
    ProcessGroup,
    ReduceOp,
    Store,
    TCPStore,
)

from tridentserve.device import find_device
from tridentserve.device.backends import LOOPBACK, make_gloo
from tridentserve.errors import GroupError
from tridentserve.parallel.collectives import CollectiveGroup

MakeBackend = Callable[[Any, int, int, float], tuple[Any, Any]]

# Longest time until the store answers: seconds on an idle node, more where many workers start at once.
_STORE_TIMEOUT_S = 120.0


def connect_store(
    host: str = LOOPBACK, port: int = 0, *, is_server: bool = False, timeout_s: float = _STORE_TIMEOUT_S
) -> TCPStore:
    """Start or reach the key-value store in which members of a group find each other.

    The server listens on `host` only; port 0 takes a free one, which `.port` then holds. Raises `GroupError` when the
    address cannot be bound, or no server answers there within `timeout_s`.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        if not is_server:
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        # A TCPStore that binds by itself listens on every interface of the machine.
        listener = socket.create_server((host, port), backlog=128)
        return TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
    except (OSError, RuntimeError) as error:
        role = "start" if is_server else "reach"
        raise GroupError(f"cannot {role} the store of the process groups at {host}:{port}: {error}") from error


class SequenceGroup(CollectiveGroup):
    """The members that run one plan together. All of them call the same methods in the same order.

    A collective that fails raises a `GroupError` that names the group; from then on `failed` is True and the group
    cannot be used. Tensors live on `device`.
    """

    def __init__(
        self, name: str, process_group: ProcessGroup, device: torch.device, control: ProcessGroup | None = None
    ) -> None:
        """`control`: a group of the same members whose collectives are in host memory, where those of `process_group`
        are not. Commands go over it: they wait for no work of the device, and a member that has left is noticed at
        once."""
        self.name = name
        self.device = device
        self._process_group: ProcessGroup | None = process_group
        self._control = control
        self._has_control = control is not None
        self.rank = process_group.rank()
        self.size = process_group.size()
        self.failed = False
        self.compiled: set[Hashable] = set()
        """Names of the code that all members have compiled (see `StepPatience`)."""
        self._timeout: timedelta | None = None  # that it was made with, once waits have been limited

    def start_all_to_all_into(
        self, received: torch.Tensor, received_sizes: Sequence[int], sent: torch.Tensor, sent_sizes: Sequence[int]
    ) -> Callable[[], None]:
        with self._guard_collective("all_to_all"):
            work = self._get_members().alltoall_base(
                received.view(-1), sent.view(-1), list(received_sizes), list(sent_sizes)
            )

        def finish() -> None:
            with self._guard_collective("all_to_all"):
                work.wait()

        return finish

    def start_gather(self, whole: torch.Tensor, mine: torch.Tensor, positions: Sequence[int]) -> Callable[[], None]:
        """Begin to fill `whole`, a run of as many equal parts as there are members, with the part `mine` of each of
        them: that of rank r comes to the place `positions[r]`. Returns the function that waits for it, which may be
        called after other collectives. Neither tensor may be changed before."""
        parts = whole.view(self.size, -1)
        with self._guard_collective("gather"):
            if find_device(self.device).is_host:
                # Gloo gathers into memory of its own, as much as `whole`; a broadcast comes where it belongs.
                parts[positions[self.rank]].copy_(mine)
                works = [self._get_members().broadcast(parts[place], rank) for rank, place in enumerate(positions)]
            elif list(positions) == list(range(self.size)):
                works = [self._get_members()._allgather_base(whole, mine)]
            else:
                works = [self._get_members().allgather([[parts[position] for position in positions]], [mine])]

        def finish() -> None:
            with self._guard_collective("gather"):
                for work in works:
                    work.wait()

        return finish

    def broadcast_tensors(self, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Return the named tensors of rank 0 on every rank. Other ranks pass None. The layout is sent first, then
        tensor by tensor."""
        if self.rank == 0:
            tensors = {name: tensor.to(self.device).contiguous() for name, tensor in (tensors or {}).items()}
        layout = self.broadcast_json(
            {
                name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape]
                for name, tensor in (tensors or {}).items()
            }
        )
        if self.rank != 0 or tensors is None:
            tensors = {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                for name, (dtype, *shape) in layout.items()
            }
        for tensor in tensors.values():
            # Tensors are sent as bytes, since no backend knows every dtype.
            self._broadcast(tensor.view(-1).view(torch.uint8))
        return tensors

    def broadcast_json(self, value: Any = None) -> Any:
        """Return the JSON-able value of rank 0 on every rank. Rank 0 too gets it as read from JSON: tuples become
        lists."""
        payload = json.dumps(value).encode() if self.rank == 0 else b""
        length = self.agree(len(payload))
        buffer = bytearray(payload) if self.rank == 0 else bytearray(length)
        data = torch.frombuffer(buffer, dtype=torch.uint8)
        self._command(data)
        return json.loads(bytes(data.numpy()))

    def agree(self, command: int = 0) -> int:
        """Return the `command` of rank 0 on every rank, so that all members continue or stop at the same step. It
        returns when all of them have called it, so that each knows how long the slowest of them took."""
        word = torch.tensor([command if self.rank == 0 else 0], dtype=torch.int64)
        with self._guard_collective("command"):
            self._get_members(self._has_control).allreduce(word, ReduceOp.SUM).wait()
        return int(word.item())

    def limit_waits(self, timeout_s: float | None) -> None:
        """Bound the time that this member waits for others in host memory, in each collective from now on. The timeout
        of the group is the longest, and holds again with None. Collectives on a device are not bounded by this."""
        with self._guard_collective("limit"):
            backend: Any = self._get_members(self._has_control)._get_backend(torch.device("cpu"))
            if self._timeout is None:
                self._timeout = backend.options._timeout
            limit = self._timeout if timeout_s is None else min(timedelta(seconds=timeout_s), self._timeout)
            backend._set_default_timeout(limit)

    def connect(self) -> None:
        """Have all members reach each other, and take the memory that this needs: NCCL does both at the first
        collective of each kind, and gloo when a group is made."""
        if find_device(self.device).is_host:
            return
        word = torch.zeros(1, dtype=torch.uint8, device=self.device)
        self._broadcast(word)
        self.all_to_all([word] * self.size, [(1,)] * self.size)
        self.start_gather(word.new_empty(self.size), word, range(self.size))()
        find_device(self.device).wait_for_work()

    def confirm(self) -> None:
        """Raise `GroupError` where a collective before this may have been given up, after the device has done its work.
        All members call it. Where collectives are waited for on the device, those that are given up raise nothing: the
        next one does."""
        if self._has_control:
            self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))

    def abort(self) -> None:
        """Give up the collectives of this member, from whatever thread: it is known that they cannot end."""
        self.failed = True
        with suppress(AttributeError):  # it has been closed meanwhile
            find_device(self.device).abort_group(self._process_group)

    def close(self) -> None:
        """Leave the group. Members that wait in a collective get their `GroupError` at once."""
        self.failed = True
        if self._process_group is not None:
            find_device(self.device).abort_group(self._process_group)
        # Gloo's connections close with the last reference.
        self._process_group = self._control = None

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            with self._guard_collective("broadcast"):
                self._get_members().broadcast(tensor, 0).wait()

    def _command(self, tensor: torch.Tensor) -> None:
        """Give all members rank 0's tensor, in host memory."""
        if tensor.numel():
            with self._guard_collective("command"):
                self._get_members(self._has_control).broadcast(tensor, 0).wait()

    def _get_members(self, of_control: bool = False) -> ProcessGroup:
        # The process group is never kept in a variable: the traceback of an error would hold it, and so keep open the
        # connections that `close` ends.
        if self.failed or self._process_group is None:
            raise GroupError(f"group {self.name!r} has failed or was closed before; make a new one")
        if of_control and self._control is not None:
            return self._control
        return self._process_group

    @contextmanager
    def _guard_collective(self, operation: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.failed = True
            raise GroupError(
                f"{operation} failed in group {self.name!r} on rank {self.rank} of {self.size} "
                f"(a member died, left or never came): {error}"
            ) from error


def make_store_prefix(name: str) -> str:
    """The beginning of all keys that members of a group leave in the store."""
    return f"group/{name}/"


def make_group(store: Store, name: str, rank: int, size: int, device: torch.device, timeout_s: float) -> SequenceGroup:
    """Join the group `name` of `size` members as `rank`, and return when all have joined (5 ms on one machine with
    gloo; NCCL connects at the first collective).

    Each group needs a new name, also one that replaces a failed group. Raises `GroupError` when a member does not
    come within `timeout_s`, which also bounds every later collective.
    """
    own = find_device(device)
    try:
        process_group = _join(store, name, rank, size, own.make_backend, own.kind, timeout_s)
        control = None
        if not own.is_host:
            control = _join(store, f"{name}/control", rank, size, make_gloo, "cpu", timeout_s)
    except RuntimeError as error:
        raise GroupError(f"cannot make group {name!r} as rank {rank} of {size}: {error}") from error
    return SequenceGroup(name, process_group, device, control)


def _join(
    store: Store, name: str, rank: int, size: int, make_backend: MakeBackend, kind: str, timeout_s: float
) -> ProcessGroup:
    """A process group of one backend, for tensors on devices of one kind."""
    prefixed = PrefixStore(make_store_prefix(name).removesuffix("/"), store)
    process_group = ProcessGroup(prefixed, rank, size)
    backend, backend_type = make_backend(prefixed, rank, size, timeout_s)
    backend._set_sequence_number_for_group()
    process_group._register_backend(torch.device(kind), backend_type, backend)
    process_group._set_default_backend(backend_type)
    return process_group
