"""Asks a live service what things cost: each size on its own, then by several clients at once, then in a hurry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from traces.client.replay import ReplaySession, open_session
from traces.requests import TraceRequest
from traces.results import ReplayResult

# The first requests pay for pages, caches and groups that are made on first use.
_UNCOUNTED = 1
_MOST_ROUNDS_TOGETHER = 3


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The answers of a service to the requests of its warm-up."""

    alone: Sequence[ReplayResult]
    """Answers to requests that the service had to itself."""
    hurried: Sequence[ReplayResult]
    """Answers to such requests with deadlines that only two workers can keep to."""
    crowds: Sequence[Sequence[ReplayResult]]
    """Answers to several clients at once, each of which sends its next request when it has the answer to the last."""

    @property
    def everything(self) -> list[ReplayResult]:
        return [*self.alone, *self.hurried, *(result for crowd in self.crowds for result in crowd)]

    def add(self, other: WarmUp) -> WarmUp:
        """The warm-up of both together."""
        return WarmUp([*self.alone, *other.alone], [*self.hurried, *other.hurried], [*self.crowds, *other.crowds])


class WarmUpClient:
    """Sends the requests of a warm-up, all with `num_steps` denoising steps. `on_done` is called after each answer;
    `count_requests` gives the largest number of them."""

    def __init__(
        self, url: str, model: str, sides: Sequence[int], num_steps: int, rounds: int, on_done: Callable[[], None]
    ) -> None:
        self._url, self._model, self._num_steps, self._on_done = url, model, num_steps, on_done
        self._sides, self._rounds, self._rounds_together = sides, rounds, min(rounds, _MOST_ROUNDS_TOGETHER)
        self._numbers = count()

    @staticmethod
    def count_requests(sides: Sequence[int], rounds: int, num_workers: int) -> int:
        """The most requests that a whole warm-up sends."""
        clients: list[int] = [1, *range(2, num_workers + 1), _count_hurried_clients(num_workers)]
        return len(sides) * (_UNCOUNTED + rounds + min(rounds, _MOST_ROUNDS_TOGETHER) * sum(clients))

    async def run(self, num_workers: int, slo_ms: Callable[[Sequence[ReplayResult]], Mapping[int, float]]) -> WarmUp:
        """`rounds` requests of each size, one after the other; then 2, 3, ... `num_workers` clients at once; then one
        client in a hurry, and as many as keep all workers busy. `slo_ms` gives, by side and from all answers until
        then, the deadlines of those; a side that it leaves out is not asked for."""
        # One session: what a client does once must not compete with the workers for cores at each request.
        session = await open_session([self._make_request(side, None) for side in self._sides], self._url)
        alone = []
        for side in self._sides:
            alone += [await self._ask(session, side, None) for _ in range(_UNCOUNTED + self._rounds)][_UNCOUNTED:]
        no_hurry = dict.fromkeys(self._sides)
        crowds = [await self._send_together(session, number, no_hurry) for number in range(2, num_workers + 1)]
        deadlines = slo_ms([*alone, *(result for crowd in crowds for result in crowd)])
        if not deadlines:
            return WarmUp(alone, [], crowds)
        hurried = await self._send_together(session, 1, deadlines)
        crowds.append(await self._send_together(session, _count_hurried_clients(num_workers), deadlines))
        return WarmUp(alone, hurried, crowds)

    async def _send_together(
        self, session: ReplaySession, number: int, slo_ms: Mapping[int, float] | Mapping[int, None]
    ) -> list[ReplayResult]:
        """Each of the clients begins with another size."""

        async def run_client(index: int) -> list[ReplayResult]:
            turns = [list(slo_ms)[(index + turn) % len(slo_ms)] for turn in range(self._rounds_together * len(slo_ms))]
            return [await self._ask(session, side, slo_ms[side]) for side in turns]

        answers = await asyncio.gather(*(run_client(index) for index in range(number)))
        return [result for results in answers for result in results]

    async def _ask(self, session: ReplaySession, side: int, slo_ms: float | None) -> ReplayResult:
        request, model = self._make_request(side, slo_ms), session.models[0]
        result = await session.send(request, model, next(self._numbers), session.now_s())
        self._on_done()
        return result

    def _make_request(self, side: int, slo_ms: float | None) -> TraceRequest:
        return TraceRequest(
            "w", 0.0, side, side, 1, "a paper boat on a lake", "", self._num_steps, model=self._model, slo_ms=slo_ms
        )


def _count_hurried_clients(num_workers: int) -> int:
    return max(2, num_workers // 2)
