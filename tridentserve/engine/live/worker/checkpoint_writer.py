"""Writes state checkpoints of a running plan to another worker, while the plan's steps continue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from tridentserve.engine.live.handoff.buffer import HandoffBuffer
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.messages import CheckpointNote
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.plans import DispatchPlan, StageSpan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The denoising states of a plan's members at one step boundary."""

    num_steps: int
    """Denoising steps of the plan that are done."""
    states: dict[str, tuple[int, Parcel]]
    """By request: how many of the request's steps are done, and its state. The tensors are those of the running plan: a
    step makes new ones and changes none."""
    spans: tuple[StageSpan, ...]
    """Stages of the plan that have run so far."""


class CheckpointWriter:
    """Writes the checkpoints of one plan, on its leader. One checkpoint at a time is under way; a newer one replaces
    one that waits. Checkpoints are made in the device thread and written outside it, so no step waits for it."""

    def __init__(
        self,
        plan: DispatchPlan,
        handoff: HandoffBuffer,
        tell: Callable[[CheckpointNote], None],
        count: Callable[[int, float], None] = lambda nbytes, seconds: None,
    ) -> None:
        """`tell` is called for each checkpoint that has arrived, `count` with its bytes and seconds."""
        self._plan = plan
        self._handoff = handoff
        self._tell = tell
        self._count = count
        self._waiting: Checkpoint | None = None
        self._task: asyncio.Task[None] | None = None

    def write_next(self, checkpoint: Checkpoint) -> None:
        """Write this checkpoint once the one under way has ended."""
        self._waiting = checkpoint
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write_all())

    def drop_waiting(self) -> None:
        """The plan has ended: a checkpoint that waits is of no use. One that is under way ends."""
        self._waiting = None

    async def _write_all(self) -> None:
        while (checkpoint := self._waiting) is not None:
            self._waiting = None
            await self._write(checkpoint)
        self._task = None

    async def _write(self, checkpoint: Checkpoint) -> None:
        plan, start_s = self._plan, time.perf_counter()
        if plan.saves is None:
            return
        parcels = {
            HandoffKey(request_id, plan.plan_id, step): parcel
            for request_id, (step, parcel) in checkpoint.states.items()
            if not self._handoff.has_left(request_id, plan.plan_id)
        }
        keeper = plan.saves.keeper
        outcomes = await asyncio.gather(
            *(self._handoff.send_checkpoint(key, parcel, keeper) for key, parcel in parcels.items()),
            return_exceptions=True,
        )
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:  # the next one may succeed; until then the one before counts
            logger.warning(
                "plan %d: %s has no checkpoint of step %d: %s", plan.plan_id, keeper, checkpoint.num_steps, errors[0]
            )
        elif parcels:
            nbytes = sum(parcel.layout().nbytes for parcel in parcels.values())
            self._count(nbytes, time.perf_counter() - start_s)
            self._tell(CheckpointNote(checkpoint.num_steps, checkpoint.spans))
