"""Tells clients that watch their requests when these are predicted to end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tridentserve.engine.live.client_requests import ClientRequest, ClientRequests, Prospect
from tridentserve.engine.live.core_thread import CoreThread
from tridentserve.engine.live.updates import ProgressUpdate, QueuedUpdate
from tridentserve.scheduling.scheduler import Scheduler

# Seconds between two predictions, and the most of the scheduler's time that they take.
PROSPECT_PERIOD_S = 1.0
_MOST_SHARE = 0.05

logger = logging.getLogger(__name__)


class ProspectTeller:
    """Asks the scheduler for the prospects of all requests while some are watched."""

    def __init__(
        self,
        scheduler: Scheduler,
        core: CoreThread,
        requests: ClientRequests,
        is_waiting: Callable[[ClientRequest], bool],
    ) -> None:
        """`scheduler` is asked in its own thread. `is_waiting`: whether a request waits for its first workers."""
        self._scheduler = scheduler
        self._core = core
        self._requests = requests
        self._is_waiting = is_waiting
        self._news = asyncio.Event()

    def wake(self) -> None:
        """A request is watched."""
        self._news.set()

    async def run(self) -> None:
        """Tell until the task is cancelled."""
        while True:
            if not self._requests.list_watched():
                self._news.clear()
                await self._news.wait()
            began_s = time.monotonic()
            try:
                await self._tell()
            except Exception:  # predictions are an extra: whatever fails here must not end the service
                logger.exception("prospects could not be told")
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(PROSPECT_PERIOD_S, took_s / _MOST_SHARE))

    async def _tell(self) -> None:
        scheduler, core = self._scheduler, self._core
        outlooks = await asyncio.wrap_future(core.call(lambda: scheduler.list_outlooks(core.now_s())))
        for request in self._requests.list_watched():
            if (outlook := outlooks.get(request.key)) is None:
                continue
            request.prospect = Prospect(outlook.queue_position, outlook.finish_s)
            if self._is_waiting(request) and isinstance(request.latest, QueuedUpdate):
                update = QueuedUpdate(request.spec.request_id, outlook.queue_position, self._count_left(request))
                request.publish(update)

    def make_progress(self, request: ClientRequest, steps_done: int) -> ProgressUpdate:
        """The update of a step, with what was predicted last."""
        spec = request.spec
        position = None if request.prospect is None else 0
        return ProgressUpdate(
            spec.request_id, steps_done, spec.num_inference_steps, position, self._count_left(request)
        )

    def _count_left(self, request: ClientRequest) -> float | None:
        """Seconds until the end that was predicted; 0 when it is overdue."""
        return None if request.prospect is None else max(0.0, request.prospect.end_s - self._core.now_s())
