"""Copies the denoising states of a running plan to another worker while the steps go on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from tridentserve.engine.live.handoff.buffer import HandoffBuffer
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.messages import StatesSaved
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.plans import DispatchPlan, StageSpan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The states of a plan's members after `num_steps` of its steps, by request, each with the number of the request's
    steps that are done then. The tensors are those of the running plan: a step makes new ones and changes none."""

    num_steps: int
    states: dict[str, tuple[int, Parcel]]
    spans: tuple[StageSpan, ...]


class StateSaver:
    """Of one plan, on its leader. One snapshot at a time is under way; a newer one replaces one that waits. All but the
    making of a snapshot is done beside the device thread, so no step waits for it."""

    def __init__(
        self,
        plan: DispatchPlan,
        handoff: HandoffBuffer,
        tell: Callable[[StatesSaved], None],
        count: Callable[[int, float], None] = lambda nbytes, seconds: None,
    ) -> None:
        """`tell` hears of each snapshot that has arrived, `count` of its bytes and seconds."""
        self._plan = plan
        self._handoff = handoff
        self._tell = tell
        self._count = count
        self._waiting: Snapshot | None = None
        self._task: asyncio.Task[None] | None = None

    def offer(self, snapshot: Snapshot) -> None:
        """Copy this one next."""
        self._waiting = snapshot
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """The plan has ended: what waits is of no use. A copy that is under way ends."""
        self._waiting = None

    async def _run(self) -> None:
        while (snapshot := self._waiting) is not None:
            self._waiting = None
            await self._save(snapshot)
        self._task = None

    async def _save(self, snapshot: Snapshot) -> None:
        plan, start_s = self._plan, time.perf_counter()
        if plan.saves is None:
            return
        copies = {
            HandoffKey(request_id, plan.plan_id, step): parcel
            for request_id, (step, parcel) in snapshot.states.items()
            if not self._handoff.has_left(request_id, plan.plan_id)
        }
        keeper = plan.saves.keeper
        outcomes = await asyncio.gather(
            *(self._handoff.save(key, parcel, keeper) for key, parcel in copies.items()), return_exceptions=True
        )
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:  # the next one may do better; until then the one before counts
            logger.warning(
                "plan %d: %s has no copy of step %d: %s", plan.plan_id, keeper, snapshot.num_steps, errors[0]
            )
        elif copies:
            nbytes = sum(parcel.layout().nbytes for parcel in copies.values())
            self._count(nbytes, time.perf_counter() - start_s)
            self._tell(StatesSaved(snapshot.num_steps, snapshot.spans))
