"""The `Backend` over several cells: each request goes to the cell that is predicted to finish it first."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from deployments.assembly.service_times import make_service_times
from deployments.backend import Backend, closing
from deployments.config.app import AppArgs
from deployments.serve.call_errors import LostCallError
from deployments.serve.cell_health import combine_health
from deployments.serve.remote_backend import RemoteBackend
from tridentserve.cells.router import SUMMARY_PERIOD_S, CellRouter
from tridentserve.engine.live.updates import CompletedUpdate, QueuedUpdate, Update
from tridentserve.errors import (
    LoraNotFoundError,
    OverloadedError,
    ProfileError,
    RequestNotFoundError,
    UnknownModelError,
)
from tridentserve.models.lora_files import LoraFile
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling.estimation.request_work import RequestWork, estimate_work
from tridentserve.scheduling.events import Reject
from tridentserve.scheduling.prediction.predictor import Quote
from tridentserve.scheduling.watching.cluster_state import ClusterState, combine_states

# A cell whose scheduler does not answer for so long is treated as lost.
_SILENCE_S = 30.0
# A lost cell is asked again so soon.
_PAUSE_S = 0.5
# A request for which no cell is known waits so long for one.
_PATIENCE_S = 5.0
# Answers that are worth no longer waiting: whether a cell has a request, and its health.
_ANSWER_S = 2.0

logger = logging.getLogger(__name__)


def choose_backend(cells: Sequence[RemoteBackend], args: AppArgs) -> Backend:
    """The backend of a service with these cells, which is that of its scheduler where there is one."""
    if len(cells) == 1:
        return cells[0]
    return CellsBackend(cells, make_estimate(args), args.max_retries, args.cluster.num_workers)


def make_estimate(args: AppArgs) -> Callable[[RequestSpec], RequestWork]:
    """The work of requests by the profiles of a configuration. A model that was added since counts from the next
    summary of its cell on: until then its requests are taken for none."""
    times = make_service_times(args)

    def estimate(spec: RequestSpec) -> RequestWork:
        try:
            return estimate_work(times, spec)
        except ProfileError:
            return RequestWork(degree=1, seconds=0.0, gpu_seconds=0.0)

    return estimate


class CellsBackend:
    """Asks all cells for their loads, and sends the requests of a cell that is lost to others. All replicas that have
    one decide alike and know nothing of each other, but through the loads. It lives in one event loop."""

    def __init__(
        self,
        cells: Sequence[RemoteBackend],
        estimate: Callable[[RequestSpec], RequestWork],
        max_losses: int,
        num_workers: int,
    ) -> None:
        """A request fails when more than `max_losses` cells were lost under it. `num_workers` are those of all cells
        when none is lost."""
        self._cells = tuple(cells)
        self._max_losses = max_losses
        self._num_workers = num_workers
        self._router = CellRouter(estimate, seed=os.getpid())
        self._lost: set[int] = set()
        # The cells of unfinished requests: each once for every client of theirs.
        self._open: defaultdict[str, list[int]] = defaultdict(list)
        self._has_news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def generate(
        self, spec: RequestSpec, inputs: GenerationInputs, with_progress: bool = True
    ) -> AsyncIterator[Update]:
        began_s, losses = time.monotonic(), 0
        while True:
            cell = await self._choose(spec, inputs)
            waited_s = spec.waited_s + time.monotonic() - began_s
            updates = self._cells[cell].generate(replace(spec, waited_s=waited_s), inputs, with_progress)
            try:
                with self._note_open(spec.request_id, cell):
                    async with closing(updates):
                        async for update in updates:
                            if isinstance(update, CompletedUpdate):
                                yield replace(update, retries=update.retries + losses)
                            elif not (losses and isinstance(update, QueuedUpdate)):
                                yield update
                return
            except LostCallError:
                losses += 1
                self._lose(cell)
                if losses > self._max_losses:
                    raise
                logger.warning("request %s is sent to another cell: cell %d was lost", spec.request_id, cell)

    async def cancel(self, request_id: str) -> bool:
        """Stop a request in the cell that has it."""
        return True in await self._ask_all(lambda cell: cell.cancel(request_id))

    async def quote(self, specs: Sequence[RequestSpec]) -> list[Quote | Reject | None]:
        """Each by the cell to which the request would be sent now."""
        self._follow()
        return [await self._quote(spec) for spec in specs]

    async def _quote(self, spec: RequestSpec) -> Quote | Reject | None:
        cell = await self._wait_for_choice(lambda: self._router.find_best(spec))
        (quote,) = await self._cells[cell].quote([spec])
        return quote

    async def get_health(self) -> dict[str, Any]:
        """The health of all cells together, and that of each."""
        answers = await self._ask_all(lambda cell: cell.get_health())
        return combine_health([answer if isinstance(answer, dict) else {} for answer in answers], self._num_workers)

    async def describe_cluster(self, cursor: tuple[int, ...]) -> ClusterState:
        """The state of all cells that answer."""
        known = cursor or (0,) * len(self._cells)
        after = dict(zip(self._cells, known, strict=True))
        answers = await self._ask_all(lambda cell: cell.describe_cluster((after[cell],)))
        states = [answer if isinstance(answer, ClusterState) else None for answer in answers]
        if not any(states):
            raise LostCallError("no scheduler answers at the moment")
        return combine_states(states, known)

    async def add_lora(self, model: str, name: str, path: str) -> LoraFile:
        """In all cells that serve the model, or else in none."""
        answers = await asyncio.gather(
            *(cell.add_lora(model, name, path) for cell in self._cells), return_exceptions=True
        )
        served = [answer for answer in answers if not isinstance(answer, UnknownModelError)]
        errors = [answer for answer in served if isinstance(answer, BaseException)]
        if not errors and served:
            return next(answer for answer in served if not isinstance(answer, BaseException))
        added = [cell for cell, answer in zip(self._cells, answers, strict=True) if isinstance(answer, LoraFile)]
        await asyncio.gather(*(cell.remove_lora(model, name) for cell in added), return_exceptions=True)
        raise next(error for error in (*errors, *answers) if isinstance(error, BaseException))

    async def remove_lora(self, model: str, name: str) -> None:
        """In all cells that have it. One that does not answer may still have it, and then the caller hears of it."""
        answers = await asyncio.gather(*(cell.remove_lora(model, name) for cell in self._cells), return_exceptions=True)
        absent = (UnknownModelError, LoraNotFoundError)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if any(not isinstance(error, absent) for error in errors) or len(errors) == len(answers):
            raise max(errors, key=lambda error: not isinstance(error, absent))

    async def explain(self, request_id: str) -> dict[str, Any]:
        """By the cell that had the request. Cells that had not say so at once; one that does may take a minute."""
        answers = await asyncio.gather(*(cell.explain(request_id) for cell in self._cells), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for answer in answers:
            if not isinstance(answer, BaseException):
                return answer
        # A cell that does not answer may have had it.
        raise next((error for error in errors if not isinstance(error, RequestNotFoundError)), errors[0])

    async def close(self) -> None:
        """Ask for no loads any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _choose(self, spec: RequestSpec, inputs: GenerationInputs) -> int:
        """The cell that has the request already, else the router's choice. Raises `OverloadedError` when no cell serves
        the model for a while."""
        self._follow()
        if not inputs.id_drawn:
            has_request = await self._ask_all(lambda cell: cell.has_request(spec.request_id))
            if True in has_request:
                return has_request.index(True)
            for cell in self._open.get(spec.request_id, ()):
                if cell not in self._lost:  # sent there a moment ago
                    return cell
        return await self._wait_for_choice(lambda: self._router.choose(spec))

    async def _wait_for_choice(self, choose: Callable[[], int]) -> int:
        """A choice of the router, which may know no cell for a while. Raises `OverloadedError`."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while True:
                    try:
                        return choose()
                    except OverloadedError as error:
                        refusal = error
                    self._has_news.clear()
                    await self._has_news.wait()
        except TimeoutError:
            raise refusal from None

    @contextmanager
    def _note_open(self, request_id: str, cell: int) -> Iterator[None]:
        """A request is in this cell meanwhile."""
        self._open[request_id].append(cell)
        try:
            yield
        finally:
            self._open[request_id].remove(cell)
            if not self._open[request_id]:
                del self._open[request_id]

    async def _ask_all(self, ask: Callable[[RemoteBackend], Any]) -> list[Any]:
        """The answer of each cell; the error of one that is lost, or does not answer in time."""
        self._follow()

        async def ask_one(number: int) -> Any:
            if number in self._lost:
                raise LostCallError(f"cell {number} is lost")
            async with asyncio.timeout(_ANSWER_S):
                return await ask(self._cells[number])

        return await asyncio.gather(*map(ask_one, range(len(self._cells))), return_exceptions=True)

    def _follow(self) -> None:
        """Begin to ask for loads, at the first use."""
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._follow_cell(number)) for number in range(len(self._cells))]

    async def _follow_cell(self, number: int) -> None:
        while True:
            num_sent = self._router.count_sent(number)
            try:
                async with asyncio.timeout(_SILENCE_S):
                    summary = await self._cells[number].summarize_load()
            except Exception as error:  # whatever it is, the cell is absent at the moment, and may come back
                logger.info("cell %d does not tell its load: %s", number, type(error).__name__)
                self._lose(number)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._lost.discard(number)
            self._router.update(number, summary, num_sent)
            self._has_news.set()
            await asyncio.sleep(SUMMARY_PERIOD_S)

    def _lose(self, number: int) -> None:
        self._lost.add(number)
        self._router.lose(number)
