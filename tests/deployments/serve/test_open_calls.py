"""Calls of the scheduler are ended by their id, whichever of call and end comes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from deployments.serve.open_calls import OpenCalls


async def _wait_forever(calls: OpenCalls, call_id: str, begun: asyncio.Event) -> AsyncGenerator[int, None]:
    with calls.hold(call_id):
        begun.set()
        yield 1
        await asyncio.Event().wait()


async def _consume(updates: AsyncGenerator[int, None]) -> None:
    async with aclosing(updates):
        async for _ in updates:
            pass


async def test_an_ended_call_is_cancelled_and_no_other() -> None:
    calls, begun = OpenCalls(), [asyncio.Event(), asyncio.Event()]
    tasks = [asyncio.create_task(_consume(_wait_forever(calls, str(i), begun[i]))) for i in range(2)]
    for event in begun:
        await event.wait()
    calls.end("0")
    await asyncio.wait([tasks[0]])
    assert tasks[0].cancelled()
    assert not tasks[1].done()
    assert len(calls) == 1
    calls.end("1")
    await asyncio.wait([tasks[1]])
    assert len(calls) == 0


async def test_a_call_that_comes_after_its_end_does_not_begin() -> None:
    calls, begun = OpenCalls(), asyncio.Event()
    calls.end("late")
    with pytest.raises(asyncio.CancelledError):
        await _consume(_wait_forever(calls, "late", begun))
    assert not begun.is_set()


async def test_the_end_of_a_call_that_has_ended_has_no_effect() -> None:
    calls = OpenCalls()
    with calls.hold("a"):
        pass
    calls.end("a")
    await asyncio.sleep(0)
    with calls.hold("b"):
        assert len(calls) == 1
