"""Asks a live service what things cost: each size on its own, then several requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from comparison.calibration import WarmUp
from traces.replay import replay
from traces.requests import TraceRequest
from traces.results import ReplayResult

# What comes first pays for pages, caches and groups that are made on first use.
_UNCOUNTED = 1


def warm_up(
    url: str, model: str, sides: Sequence[int], num_steps: int, rounds: int, at_once: int, on_done: Callable[[], None]
) -> WarmUp:
    """`rounds` requests of each size one after the other, then rounds of 2, 3, ... `at_once` together. `on_done` is
    called after each request or round; there are `num_rounds` of them."""

    def send(side: int, number: int) -> list[ReplayResult]:
        requests = [
            TraceRequest(f"w{i}", 0.0, side, side, 1, "a paper boat on a lake", "", num_steps, seed=i, model=model)
            for i in range(number)
        ]
        results = asyncio.run(replay(requests, url))
        on_done()
        return results

    alone: list[ReplayResult] = []
    for side in sides:
        answers = [send(side, 1)[0] for _ in range(_UNCOUNTED + rounds)]
        alone += answers[_UNCOUNTED:]
    together = {
        number: [result for side in sides for _ in range(_ROUNDS_TOGETHER) for result in send(side, number)]
        for number in range(2, at_once + 1)
    }
    return WarmUp(alone, together)


_ROUNDS_TOGETHER = 3


def num_rounds(sides: Sequence[int], rounds: int, at_once: int) -> int:
    """How often `warm_up` calls back."""
    return len(sides) * (_UNCOUNTED + rounds + _ROUNDS_TOGETHER * (at_once - 1))
