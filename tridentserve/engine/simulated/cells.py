"""A cluster in several cells: each has a scheduler and workers of its own, and a router sends it requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tridentserve.cells.router import SUMMARY_PERIOD_S, CellRouter
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated.agenda import Agenda
from tridentserve.engine.simulated.cell import SimulatedCell
from tridentserve.engine.simulated.engine import TimedRequest, check_failures, order_arrivals
from tridentserve.engine.simulated.options import SimulationOptions
from tridentserve.engine.simulated.recorder import Recorder
from tridentserve.engine.simulated.result import SimulationResult
from tridentserve.errors import ConfigError, OverloadedError
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class CellParts:
    """The parts of one cell; see `SimulatedEngine`."""

    scheduler: Scheduler
    workers: Sequence[WorkerSpec]
    placement: PlacementPlan
    times: StageTimes


@dataclass(frozen=True, slots=True)
class CellLoss:
    """A cell is lost with its scheduler and all its workers, and does not come back."""

    time_s: float
    cell: int
    """Its number, from 0."""


class SimulatedCells:
    """Serves one trace by the decisions of several schedulers. With one cell it is `SimulatedEngine`.

    The requests of a cell that is lost are sent to others, with the deadlines that they had."""

    def __init__(
        self,
        cells: Sequence[CellParts],
        router: CellRouter,
        options: SimulationOptions | None = None,
        losses: Sequence[CellLoss] = (),
    ) -> None:
        """Schedulers and the router are new. Raises `ConfigError` when a worker or a cell is to be lost that does not
        exist, and for a decision log, as there is one for each cell."""
        self._options = options or SimulationOptions()
        self._router = router
        self._losses = tuple(losses)
        self._num_workers = sum(len(parts.workers) for parts in cells)
        self._agenda = Agenda()
        self._recorder = Recorder(self._options.keep_plans, self._options.on_progress)
        check_failures(self._options, [worker for parts in cells for worker in parts.workers])
        lost = [loss.cell for loss in losses]
        for number in lost:
            if not 0 <= number < len(cells):
                raise ConfigError(f"losses: cell {number} is lost, but there are {len(cells)} cells, numbered from 0")
            if lost.count(number) > 1:
                raise ConfigError(f"losses: cell {number} is lost twice, and does not come back")
        if self._options.decision_log is not None:
            raise ConfigError("decision_log: a simulation of several cells writes none; simulate one cell alone")
        self._schedulers = [parts.scheduler for parts in cells]
        self._cells: dict[int, SimulatedCell] = {
            number: SimulatedCell(
                parts.scheduler,
                parts.workers,
                parts.placement,
                parts.times,
                self._options,
                self._agenda,
                self._recorder,
            )
            for number, parts in enumerate(cells)
        }
        self._arrived_s: dict[str, float] = {}
        self._has_run = False

    def run(self, arrivals: Iterable[TimedRequest]) -> SimulationResult:
        """Simulate until all requests have ended (or `end_s`). To be called once. Placements in the result are those of
        single cells. Raises `ConfigError` when a request id comes twice."""
        if self._has_run:
            raise ConfigError("a simulated engine runs once: make a new one, with new schedulers")
        self._has_run = True
        ordered, agenda = order_arrivals(arrivals), self._agenda
        for cell in self._cells.values():
            cell.start()
        last_s = max([time_s for time_s, _ in ordered] + [loss.time_s for loss in self._losses], default=0.0)
        agenda.call_at(0.0, self._publish, last_s)
        for arrival_s, spec in ordered:
            agenda.call_at(arrival_s, self._arrive, spec)
        for loss in self._losses:
            agenda.call_at(loss.time_s, self._lose, loss.cell)
        for cell in self._cells.values():
            cell.enter_failures()
        agenda.run(self._options.end_s)
        for cell in self._cells.values():
            cell.close()
        return self._recorder.make_result(self._num_workers)

    def _publish(self, last_s: float) -> None:
        """The cells that are left publish their summaries, until nothing is sent any more."""
        now_s = self._agenda.now_s
        for number in self._cells:
            summary = self._schedulers[number].summarize_load(now_s)
            self._router.update(number, summary, self._cells[number].num_received)
        if now_s < last_s:
            self._agenda.call_at(now_s + SUMMARY_PERIOD_S, self._publish, last_s)

    def _arrive(self, spec: RequestSpec) -> None:
        self._arrived_s[spec.request_id] = self._agenda.now_s
        self._recorder.record_arrival(spec, self._agenda.now_s)
        self._send(spec)

    def _send(self, spec: RequestSpec) -> None:
        try:
            cell = self._router.choose(spec)
        except OverloadedError as error:
            self._recorder.record_end(ev.Reject(spec.request_id, error.code, str(error)), self._agenda.now_s)
            return
        self._cells[cell].arrive(spec)

    def _lose(self, number: int) -> None:
        self._router.lose(number)
        lost = self._cells.pop(number)
        request_ids = lost.lose()
        lost.close()
        for request_id in request_ids:
            self._recorder.record_requeue(ev.Requeue(request_id, f"cell {number} was lost"))
            self._recorder.forget_degrading(request_id)
            waited_s = self._agenda.now_s - self._arrived_s[request_id]
            self._send(replace(self._recorder.get_spec(request_id), waited_s=waited_s))
