"""The state of a cluster in the process of its scheduler, for all replicas that watch it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from tridentserve.scheduling.watching.cluster_state import ClusterState

# The scheduler's thread is asked so often at most. Nobody asks it while nobody watches.
WATCH_PERIOD_S = 1.0


class ClusterWatch:
    """Lives in one event loop."""

    def __init__(
        self, fetch: Callable[[], Coroutine[Any, Any, ClusterState]], period_s: float = WATCH_PERIOD_S
    ) -> None:
        """`fetch` gets the present state, with all that has ended lately."""
        self._fetch = fetch
        self._period_s = period_s
        self._latest: asyncio.Task[ClusterState] | None = None
        self._begun_s = 0.0

    async def describe(self, after: int) -> ClusterState:
        """The latest state, at most `period_s` old, with the stages that have ended after number `after`. A number that
        is not known yet is that of a scheduler before this one, and stands for none."""
        latest = self._latest
        if latest is None or (latest.done() and time.monotonic() - self._begun_s >= self._period_s):
            self._begun_s = time.monotonic()
            self._latest = latest = asyncio.get_running_loop().create_task(self._fetch())
        # Others wait for the same task: one that leaves must not end it.
        state = await asyncio.shield(latest)
        first = after if after <= max(state.cursor, default=0) else 0
        return replace(state, ended=tuple(stage for stage in state.ended if stage.number > first))
