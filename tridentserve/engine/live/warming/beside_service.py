"""Keeps a warm-up from holding up a running service: it waits for idle workers, and tells the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tridentserve.engine.live.messages import ReplicaLoad
from tridentserve.engine.live.worker_handle import PlanItem, WorkerHandle
from tridentserve.plans import DispatchPlan, WorkerId
from tridentserve.scheduling import events as ev

# A run for a model that has been added waits so long for its workers to have nothing to do. Then it takes its turn as a
# request does.
_PATIENCE_S = 60.0
# Nobody knows how long something takes that is slow at its first time only.
_EXPECTED_S = 10.0

PostEvent = Callable[[ev.Event], None]


class WarmUpStop:
    """The end of the warm-up of a model that has been added."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.ended = asyncio.Event()


class BesideService:
    """The care that a warm-up takes of a service that runs."""

    def __init__(self, post: PostEvent, stop: WarmUpStop) -> None:
        self._post = post
        self._stop = stop

    async def wait_for_turn(self, handles: Sequence[WorkerHandle]) -> bool:
        """Wait for a moment without plans on these workers, but not for long. False: the warm-up is to end."""
        idle = asyncio.gather(*(handle.wait_until_idle() for handle in handles))
        asked = asyncio.ensure_future(self._stop.asked.wait())
        await asyncio.wait((idle, asked), timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (idle, asked):
            waiting.cancel()
        return not self._stop.asked.is_set()

    @contextmanager
    def announce(self, plan: DispatchPlan) -> Iterator[None]:
        """Meanwhile the scheduler knows that the workers have something to do."""
        self._post(ev.WarmUpBegun(plan, _EXPECTED_S))
        try:
            yield
        finally:
            self._post(ev.WarmUpEnded(plan))

    def listen(self, worker_id: WorkerId, take: Callable[[PlanItem], None]) -> Callable[[PlanItem], None]:
        """A taker that also tells the scheduler which weights come and go."""

        def hear(item: PlanItem) -> None:
            if isinstance(item, ReplicaLoad):
                self._post(item.make_event(worker_id))
            take(item)

        return hear
