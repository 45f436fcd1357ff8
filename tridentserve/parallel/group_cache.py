"""The groups a worker keeps for the next plan with the same members, because making one costs (NCCL: seconds)."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from tridentserve.errors import GroupError
from tridentserve.parallel.groups import SequenceGroup, make_group, store_prefix

_ABANDONED = "abandoned"


def abandon(store: Store, name: str, rank: int, use: int) -> None:
    """Abandon a use for a member whose process has ended: members that wait for it in the handshake fail."""
    store.set(_key(name, use, rank), _ABANDONED)


def _key(name: str, use: int, rank: int) -> str:
    return f"use/{name}/{use}/{rank}"


@dataclass(slots=True)
class _CachedGroup:
    """A group that is kept for later plans."""

    group: SequenceGroup
    members: tuple[str, ...]
    last_use: int
    """The latest use that it was made or found ready for."""


class GroupCache:
    """Groups by name; beyond `capacity` the least recently used is closed.

    Members evict and fail independently: one may still hold a group that another has dropped or has never had. So
    each use starts with a handshake through the store: the held group is used when all members hold the same one,
    else all make a new one.

    What a use leaves in the store is deleted when the next use of the name has begun; of a group that was dropped, when
    nobody can wait for it any more. Not thread-safe.
    """

    def __init__(self, store: Store, device: torch.device, *, capacity: int, timeout_s: float) -> None:
        self._store = store
        self._device = device
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._groups: OrderedDict[str, _CachedGroup] = OrderedDict()
        # Prefixes of keys to delete, with the time from which nobody waits for them.
        self._leftovers: deque[tuple[float, str]] = deque()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the groups held, least recently used first."""
        return tuple(self._groups)

    def acquire(self, name: str, rank: int, size: int, use: int, members: Sequence[str] = ()) -> SequenceGroup:
        """The group `name`, ready on all members. `use` is the same on all of them and grows with every use of the
        name (the plan's id). `members`: their names, for `lose`. Raises `GroupError` when a member does not
        come in time, or has abandoned this use."""
        self._tidy()
        held = self._groups.get(name)
        if held is not None and held.group.failed:
            held = None
        mine = held.group.name if held is not None else ""
        theirs = self._exchange(name, rank, size, use, mine)
        if _ABANDONED in theirs:
            self.drop(name)
            self._delete_later(f"use/{name}/{use}/")
            raise GroupError(f"group {name!r}: rank {theirs.index(_ABANDONED)} of {size} has given up")
        if held is None or any(other != mine for other in theirs):
            self.drop(name)
            group = make_group(self._store, f"{name}@{use}", rank, size, self._device, self._timeout_s)
        else:
            group = held.group
            with suppress(RuntimeError):  # of the store: nothing depends on it
                # All are here, so all have read what was written for the use before.
                self._store.delete_key(_key(name, held.last_use, rank))
        self._groups[name] = _CachedGroup(group, tuple(members), use)
        self._groups.move_to_end(name)
        while len(self._groups) > self._capacity:
            self.drop(next(iter(self._groups)))
        return group

    def abandon(self, name: str, rank: int, use: int) -> None:
        """This member takes no part in a use any more. Members that wait for it get their `GroupError` at once, in the
        handshake or in a collective."""
        abandon(self._store, name, rank, use)
        self.drop(name)
        self._delete_later(f"use/{name}/{use}/")

    def drop(self, name: str) -> None:
        """Close a group if it is held; members that wait in it fail at once."""
        held = self._groups.pop(name, None)
        if held is not None:
            held.group.close()
            self._delete_later(f"use/{name}/{held.last_use}/")
            self._delete_later(store_prefix(held.group.name))

    def lose(self, member: str) -> None:
        """Close all groups that this member was in: its process has ended."""
        for name in [name for name, held in self._groups.items() if member in held.members]:
            self.drop(name)

    def _exchange(self, name: str, rank: int, size: int, use: int, mine: str) -> list[str]:
        """The name of the group that each member holds under this name, or ""."""
        keys = [_key(name, use, member) for member in range(size)]
        try:
            self._store.set(keys[rank], mine)
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
            return [value.decode() for value in self._store.multi_get(keys)]
        except RuntimeError as error:
            absent = [member for member, key in enumerate(keys) if not self._present(key)]
            self._delete_later(f"use/{name}/{use}/")
            raise GroupError(
                f"group {name!r}: ranks {absent} of {size} did not come within {self._timeout_s:g} s: {error}"
            ) from error

    def _present(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False

    def _delete_later(self, prefix: str) -> None:
        self._leftovers.append((time.monotonic() + self._timeout_s, prefix))

    def _tidy(self) -> None:
        """Delete the keys that are due. Members delete the same keys; the second one finds none."""
        now_s = time.monotonic()
        due: list[str] = []
        while self._leftovers and self._leftovers[0][0] <= now_s:
            due.append(self._leftovers.popleft()[1])
        if due:
            with suppress(RuntimeError):  # of the store: nothing depends on it
                for key in [key for key in self._store.list_keys() if key.startswith(tuple(due))]:
                    self._store.delete_key(key)
