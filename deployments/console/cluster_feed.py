"""The state of the cluster in a replica of Api: one source for all consoles that are open there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi.sse import format_sse_event
from pydantic import TypeAdapter

from deployments.console.cluster_watch import WATCH_PERIOD_S
from deployments.console.shared_event import GZIP_HEADER, SharedEvent
from tridentserve.errors import TridentServeError
from tridentserve.scheduling.watching.cluster_state import ClusterState, EndedStage
from tridentserve.scheduling.watching.recent_history import HISTORY_S, MAX_STAGES

# What a replica sends to all its consoles together: beyond it they get the state less often than once a second. An
# event takes Api's process about 0.1 ms, so that all consoles together take a quarter of a hundredth of a core. The
# size of an event is that of its compressed form.
MAX_EVENTS_PER_S = 25
MAX_BYTES_PER_S = 2_000_000

_STATE = TypeAdapter(ClusterState)
_WAITING = SharedEvent(format_sse_event(comment="waiting"))
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Watcher:
    """One open console."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    message: SharedEvent | None = None
    """The event that it has not taken yet."""
    is_behind: bool = True
    """It lacks what came before that event: its next one is the whole state."""


class ClusterFeed:
    """Asks the service for its state while somebody watches, and makes one event of it for all. Lives in one event
    loop."""

    def __init__(
        self,
        describe: Callable[[tuple[int, ...]], Awaitable[ClusterState]],
        heartbeat_s: float,
        period_s: float = WATCH_PERIOD_S,
    ) -> None:
        """`describe`: see `Backend.describe_cluster`. After `heartbeat_s` without an event a console gets a comment."""
        self._describe = describe
        self._heartbeat_s = heartbeat_s
        self._period_s = period_s
        self._watchers: set[_Watcher] = set()
        self._asking: asyncio.Task[None] | None = None
        self._state: ClusterState | None = None
        self._ended: deque[EndedStage] = deque(maxlen=MAX_STAGES)
        self._whole: SharedEvent | None = None

    async def watch(self, packs: bool = False) -> AsyncIterator[bytes]:
        """Server-sent events for one console: first the whole state, then each state that differs from the one before,
        with the stages that have ended since. A console that is slow misses some, and gets the whole state again.
        `packs`: as a gzip stream."""
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            if packs:
                yield GZIP_HEADER
            if self._asking is None:
                self._asking = asyncio.get_running_loop().create_task(self._ask())
            elif self._state is not None:
                self._give(watcher, _WAITING)
            while True:
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await watcher.event.wait()
                except TimeoutError:
                    yield _WAITING.packed if packs else _WAITING.plain
                    continue
                watcher.event.clear()
                message, watcher.message = watcher.message, None
                if message is not None:
                    yield message.packed if packs else message.plain
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._asking is not None:
                self._asking.cancel()
                self._asking = None
                self._state = None

    async def _ask(self) -> None:
        cursor: tuple[int, ...] = ()
        self._ended.clear()
        while True:
            try:
                state = await self._describe(cursor)
            except TridentServeError as error:
                self._tell_all(_encode("unavailable", {"message": str(error)}), is_whole=True)
            except Exception:
                logger.exception("the state of the cluster cannot be told")
                self._tell_all(_encode("unavailable", {"message": "the service has a defect; see its log"}), True)
            else:
                cursor = state.cursor
                self._take(state)
            await self._rest()

    async def _rest(self) -> None:
        """Pause for as long as those who watch now ask for: many may have come since the state was told."""
        left_s, began_s = self._period_s, time.monotonic()
        while left_s > 0:
            await asyncio.sleep(min(left_s, self._period_s))
            left_s = began_s + self._choose_pause() - time.monotonic()

    def _take(self, state: ClusterState) -> None:
        """Tell a state to all, if it differs from the one before in more than its time."""
        before, self._state = self._state, state
        self._ended.extend(state.ended)
        while self._ended and self._ended[0].end_s < state.now_s - HISTORY_S:
            self._ended.popleft()
        if before is None or replace(before, now_s=state.now_s, ended=()) != state:
            self._whole = None
            self._tell_all(_encode_state("change", state))

    def _tell_all(self, message: SharedEvent, is_whole: bool = False) -> None:
        for watcher in self._watchers:
            if is_whole:
                watcher.message, watcher.is_behind = message, True
                watcher.event.set()
            else:
                self._give(watcher, message)

    def _give(self, watcher: _Watcher, message: SharedEvent) -> None:
        if watcher.message is not None:
            watcher.is_behind = True
        watcher.message = self._encode_whole() if watcher.is_behind else message
        watcher.is_behind = False
        watcher.event.set()

    def _encode_whole(self) -> SharedEvent:
        if self._whole is None:
            assert self._state is not None
            self._whole = _encode_state("state", replace(self._state, ended=tuple(self._ended)))
        return self._whole

    def _choose_pause(self) -> float:
        count, size = len(self._watchers), 0 if self._whole is None else len(self._whole.packed)
        return max(self._period_s, count / MAX_EVENTS_PER_S, count * size / MAX_BYTES_PER_S)


def _encode_state(name: str, state: ClusterState) -> SharedEvent:
    return SharedEvent(format_sse_event(event=name, data_str=_STATE.dump_json(state).decode()))


def _encode(name: str, data: dict[str, Any]) -> SharedEvent:
    return SharedEvent(format_sse_event(event=name, data_str=TypeAdapter(dict[str, Any]).dump_json(data).decode()))
