"""The groups a worker keeps for the next plan with the same members, because making one costs (NCCL: seconds)."""

from __future__ import annotations

from collections import OrderedDict
from datetime import timedelta

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from tridentserve.errors import GroupError
from tridentserve.parallel.groups import DEFAULT_TIMEOUT_S, SequenceGroup, make_group

_ABANDONED = "abandoned"


def abandon(store: Store, name: str, rank: int, use: int) -> None:
    """Speak for a member that cannot any more (its process has ended): who waits for it in the handshake fails."""
    store.set(_key(name, use, rank), _ABANDONED)


def _key(name: str, use: int, rank: int) -> str:
    return f"use/{name}/{use}/{rank}"


class GroupCache:
    """Groups by name; beyond `capacity` the least recently used is closed.

    Members evict and fail independently: one may still hold a group that another has dropped or has never had. So
    each use starts with a handshake through the store: the held group is used when all members hold the same one,
    else all make a new one.
    """

    def __init__(
        self, store: Store, device: torch.device, *, capacity: int = 16, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self._store = store
        self._device = device
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._groups: OrderedDict[str, SequenceGroup] = OrderedDict()
        self._last_use: dict[str, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the groups held, least recently used first."""
        return tuple(self._groups)

    def acquire(self, name: str, rank: int, size: int, use: int) -> SequenceGroup:
        """The group `name`, ready on all members. `use` is the same on all of them and grows with every use of the
        name (the plan's id). Raises `GroupError` when a member does not come in time, or has given this use up."""
        held = self._groups.get(name)
        if held is not None and held.failed:
            held = None
        mine = held.name if held is not None else ""
        theirs = self._exchange(name, rank, size, use, mine)
        if _ABANDONED in theirs:
            self.drop(name)
            raise GroupError(f"group {name!r}: rank {theirs.index(_ABANDONED)} of {size} has given up")
        if held is None or any(other != mine for other in theirs):
            self.drop(name)
            held = make_group(self._store, f"{name}@{use}", rank, size, self._device, self._timeout_s)
        self._groups[name] = held
        self._groups.move_to_end(name)
        while len(self._groups) > self._capacity:
            self.drop(next(iter(self._groups)))
        return held

    def abandon(self, name: str, rank: int, use: int) -> None:
        """This member will not take part (any longer) in a use: those who wait for it get their `GroupError` at once,
        in the handshake or in a collective."""
        abandon(self._store, name, rank, use)
        self.drop(name)

    def drop(self, name: str) -> None:
        """Close a group if it is held; members that wait in it fail at once."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()

    def _exchange(self, name: str, rank: int, size: int, use: int, mine: str) -> list[str]:
        """What each member holds under this name."""
        keys = [_key(name, use, member) for member in range(size)]
        try:
            self._store.set(keys[rank], mine)
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
            theirs = [value.decode() for value in self._store.multi_get(keys)]
            # All are here, so all have read what was written for the use before: it can go.
            if rank == 0 and name in self._last_use:
                for member in range(size):
                    self._store.delete_key(_key(name, self._last_use[name], member))
        except RuntimeError as error:
            absent = [member for member, key in enumerate(keys) if not self._present(key)]
            raise GroupError(
                f"group {name!r}: ranks {absent} of {size} did not come within {self._timeout_s:g} s: {error}"
            ) from error
        self._last_use[name] = use
        return theirs

    def _present(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False
