"""Turns come in the order of their numbers, whatever the order of the calls, and a failed turn blocks nobody."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tridentserve.engine.live.worker.turns import Turns


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
async def test_order(order: tuple[int, ...]) -> None:
    turns, seen = Turns(), []

    async def take(number: int) -> None:
        async with turns.wait_for(number):
            await asyncio.sleep(0)
            seen.append(number)
            if number == 1:
                raise ValueError("a plan failed")

    results = await asyncio.gather(*(take(number) for number in order), return_exceptions=True)
    assert seen == [0, 1, 2, 3]
    assert [isinstance(result, ValueError) for result in results] == [number == 1 for number in order]
