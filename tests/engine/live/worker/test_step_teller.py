"""A plan's steps are told together, in order and completely, the first one at once."""

from __future__ import annotations

import asyncio
import math

from tests.support.waiting import until
from tridentserve.engine.live.messages import ProgressNote
from tridentserve.engine.live.worker.reporting.step_teller import StepTeller


async def test_the_first_step_goes_out_at_once_and_the_rest_at_the_end() -> None:
    told: list[ProgressNote] = []
    teller = StepTeller(told.append, period_s=3600.0)
    teller.note_step("a", 1)
    teller.note_step("b", 4)
    await until(lambda: bool(told))
    assert told == [ProgressNote((("a", 1), ("b", 4)))]
    for step in (2, 3):
        teller.note_step("a", step)
    await asyncio.sleep(0.01)
    assert len(told) == 1
    teller.close()
    assert told[1:] == [ProgressNote((("a", 2), ("a", 3)))]
    teller.close()
    assert len(told) == 2


async def test_a_period_that_ends_tells_what_has_come_and_begins_another() -> None:
    told: list[ProgressNote] = []
    teller = StepTeller(told.append, period_s=0.05)
    for step in range(1, 61):
        await asyncio.to_thread(teller.note_step, "a", step)
        await asyncio.sleep(0.005)
    teller.close()
    assert [pair for note in told for pair in note.steps] == [("a", step) for step in range(1, 61)]
    assert len(told) < 60


async def test_after_a_pause_the_next_step_goes_out_at_once() -> None:
    told: list[ProgressNote] = []
    teller = StepTeller(told.append, period_s=0.01)
    teller.note_step("a", 1)
    await until(lambda: teller._timer is None and bool(told))
    teller._period_s = math.inf
    teller.note_step("a", 2)
    await until(lambda: len(told) == 2)
    teller.close()
