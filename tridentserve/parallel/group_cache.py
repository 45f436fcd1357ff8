"""The groups that a worker keeps for the next plan with the same members, since making a group takes time (with NCCL,
seconds)."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from tridentserve.device import find_device
from tridentserve.errors import GroupError
from tridentserve.parallel.group_memory import GroupMemory
from tridentserve.parallel.groups import SequenceGroup, make_group, make_store_prefix

logger = logging.getLogger(__name__)

_ABANDONED = "abandoned"


def abandon(store: Store, name: str, rank: int, use: int) -> None:
    """Answer for a member whose process has ended: the members that wait for it in the handshake fail at once."""
    store.set(_make_key(name, use, rank), _ABANDONED)


def _abort(group: SequenceGroup) -> None:
    """Abort a group. A failure is logged: nobody waits for it, and the collectives end at their timeout then."""
    try:
        group.abort()
    except RuntimeError:
        logger.exception("group %s cannot be aborted", group.name)


def _make_key(name: str, use: int, rank: int) -> str:
    return f"use/{name}/{use}/{rank}"


def _is_present(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False


@dataclass(slots=True)
class _CachedGroup:
    """A group that is ready for its next use."""

    group: SequenceGroup
    members: tuple[str, ...]
    """The workers in the group."""
    last_use: int
    """The use for which the group was made or found ready last."""


class GroupCache:
    """Groups by name. Beyond `capacity` groups the cache closes the least recently used one.

    Members evict and fail independently: one may still hold a group that another has dropped or has never had. So
    each use starts with a handshake through the store: the members use the held group when all of them hold the same
    one, and make a new one otherwise.

    The keys that a use leaves in the store are deleted when the next use of the name has begun. The keys of a dropped
    group are deleted when no member can wait for them any more. One thread uses the cache; `abort_groups_of`,
    `abort_use` and `prepare` may be called in others.
    """

    def __init__(
        self,
        store: Store,
        device: torch.device,
        *,
        capacity: int,
        timeout_s: float,
        connect: Callable[[], Store] | None = None,
        memory: GroupMemory | None = None,
    ) -> None:
        """`connect` gives `prepare` a connection of its own: calls of one wait for each other, as long as any waits for
        a member. `memory` measures each group that is made."""
        self._store = store
        self._connect = connect
        self._store_beside: Store | None = None
        self._device = device
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._memory = memory or GroupMemory(find_device(device))
        self._groups: OrderedDict[str, _CachedGroup] = OrderedDict()
        self._lock = threading.Lock()  # of `_groups` and `_lost`
        self._lost: Counter[str] = Counter()  # how often each member's process has ended
        # Prefixes of keys to delete, with the time from which no member waits for them.
        self._leftovers: deque[tuple[float, str]] = deque()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the groups held, least recently used first."""
        return tuple(self._groups)

    def acquire(self, name: str, rank: int, size: int, use: int, members: Sequence[str] = ()) -> SequenceGroup:
        """Return the group `name` when it is ready on all members.

        `use` is the same on all members and grows with every use of the name (the plan's id). `members` names the
        workers in the group, for `drop_groups_of`. Raises `GroupError` when a member does not come in time, or has
        abandoned this use."""
        self._tidy()
        with self._lock:
            held, lost = self._groups.get(name), self._count_lost(members)
        if held is not None and held.group.failed:
            held = None
        mine = held.group.name if held is not None else ""
        theirs = self._exchange(name, rank, size, use, mine)
        if _ABANDONED in theirs:
            self.drop(name)
            self._delete_later(f"use/{name}/{use}/")
            raise GroupError(f"group {name!r}: rank {theirs.index(_ABANDONED)} of {size} has given up")
        if held is not None and all(other == mine for other in theirs):
            with suppress(RuntimeError):  # An error of the store is harmless here: nothing depends on the deletion.
                # All members are here, so all of them have read the keys of the previous use.
                self._store.delete_key(_make_key(name, held.last_use, rank))
            self._hold(name, held.group, members, use, lost)
            return held.group
        self.drop(name)
        while len(self._groups) >= self._capacity:
            self.drop(next(iter(self._groups)))
        with self._memory.measure(size):
            group = make_group(self._store, f"{name}@{use}", rank, size, self._device, self._timeout_s)
            self._hold(name, group, members, use, lost)  # from here on, other threads can abort it
            group.connect()
        return group

    def _hold(self, name: str, group: SequenceGroup, members: Sequence[str], use: int, lost: Sequence[int]) -> None:
        """Keep a group as the one used last. Raises `GroupError` where more members have been lost than had been
        (`lost`)."""
        with self._lock:
            self._groups[name] = _CachedGroup(group, tuple(members), use)
            self._groups.move_to_end(name)
            is_broken = self._count_lost(members) != lost
        if is_broken:
            self.drop(name)
            raise GroupError(f"group {name!r}: a member was lost while it was made")

    def prepare(self, name: str, rank: int, size: int, use: int, members: Sequence[str]) -> None:
        """Make a group before a plan asks for it, beside what the other thread does, unless one is held. Raises
        `GroupError`."""
        with self._lock:
            held, lost = self._groups.get(name), self._count_lost(members)
        mine = "" if held is None or held.group.failed else held.group.name
        if self._store_beside is None:
            self._store_beside = self._connect() if self._connect is not None else self._store
        theirs = self._exchange(name, rank, size, use, mine, self._store_beside)
        self._delete_later(f"use/{name}/{use}/")
        if _ABANDONED in theirs:
            raise GroupError(f"group {name!r}: rank {theirs.index(_ABANDONED)} of {size} does not prepare it")
        if mine and all(other == mine for other in theirs):
            return
        with self._memory.measure(size):
            made = make_group(self._store_beside, f"{name}@{use}", rank, size, self._device, self._timeout_s)
            made.connect()
        with self._lock:
            held = self._groups.get(name)
            # One that is held may be in use.
            is_free = len(self._groups) < self._capacity if held is None else held.group.failed
            if is_free and self._count_lost(members) == lost:
                self._groups[name] = _CachedGroup(made, tuple(members), use)
                return
        made.close()

    def abort_groups_of(self, member: str) -> None:
        """The process of a member has ended: collectives with it cannot."""
        with self._lock:
            self._lost[member] += 1
            broken = [held.group for held in self._groups.values() if member in held.members]
        aborts = [threading.Thread(target=_abort, args=[group], daemon=True) for group in broken]
        for abort in aborts:  # one may take until a timeout of its own, while a member of another waits
            abort.start()
        for abort in aborts:
            abort.join()

    def abort_use(self, name: str, use: int) -> None:
        """A member has given up this use of a group: collectives of it cannot end."""
        with self._lock:
            held = self._groups.get(name)
        if held is not None and held.last_use == use:
            _abort(held.group)

    def _count_lost(self, members: Sequence[str]) -> list[int]:
        return [self._lost[member] for member in members]

    def abandon(self, name: str, rank: int, use: int) -> None:
        """Leave a use, before or after its handshake: members that wait for this one get their `GroupError` at once, in
        the handshake or in a collective."""
        abandon(self._store, name, rank, use)
        self.drop(name)
        self._delete_later(f"use/{name}/{use}/")

    def drop(self, name: str) -> None:
        """Close a group if the cache holds it. Members that wait in it fail at once."""
        with self._lock:
            held = self._groups.pop(name, None)
        if held is not None:
            held.group.close()
            self._delete_later(f"use/{name}/{held.last_use}/")
            self._delete_later(make_store_prefix(held.group.name))

    def drop_groups_of(self, member: str) -> None:
        """Close all groups of a member whose process has ended."""
        with self._lock:
            names = [name for name, held in self._groups.items() if member in held.members]
        for name in names:
            self.drop(name)

    def _exchange(self, name: str, rank: int, size: int, use: int, mine: str, store: Store | None = None) -> list[str]:
        """Write the name of the group that this member holds (`mine`), and return those of all members by rank."""
        keys, store = [_make_key(name, use, member) for member in range(size)], store or self._store
        try:
            store.set(keys[rank], mine)
            store.wait(keys, timedelta(seconds=self._timeout_s))
            return [value.decode() for value in store.multi_get(keys)]
        except RuntimeError as error:
            absent = [member for member, key in enumerate(keys) if not _is_present(store, key)]
            self._delete_later(f"use/{name}/{use}/")
            raise GroupError(
                f"group {name!r}: ranks {absent} of {size} did not come within {self._timeout_s:g} s: {error}"
            ) from error

    def _delete_later(self, prefix: str) -> None:
        self._leftovers.append((time.monotonic() + self._timeout_s, prefix))

    def _tidy(self) -> None:
        """Delete the keys that are due. All members delete the same keys, and only the first of them finds any."""
        now_s = time.monotonic()
        due: list[str] = []
        while self._leftovers and self._leftovers[0][0] <= now_s:
            due.append(self._leftovers.popleft()[1])
        if due:
            with suppress(RuntimeError):  # An error of the store is harmless here: nothing depends on the deletion.
                for key in [key for key in self._store.list_keys() if key.startswith(tuple(due))]:
                    self._store.delete_key(key)
