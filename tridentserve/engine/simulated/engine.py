"""The simulated engine: one scheduler, its simulated workers and a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated.agenda import Agenda
from tridentserve.engine.simulated.cell import SimulatedCell
from tridentserve.engine.simulated.options import SimulationOptions
from tridentserve.engine.simulated.recorder import Recorder
from tridentserve.engine.simulated.result import SimulationResult
from tridentserve.errors import ConfigError
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.tick_pacer import SchedulerLike

# The time of arrival of a request, in seconds from the start, and the request.
TimedRequest = tuple[float, RequestSpec]
# The time at which a model comes or goes, and the event.
ModelChange = tuple[float, ev.ModelAdded | ev.ModelDraining | ev.ModelRemoved]


class SimulatedEngine:
    """Serves one trace with simulated workers, by the decisions of the very scheduler that serves live."""

    def __init__(
        self,
        scheduler: SchedulerLike,
        workers: Sequence[WorkerSpec],
        placement: PlacementPlan,
        times: StageTimes,
        options: SimulationOptions | None = None,
    ) -> None:
        """`scheduler` is new, and was made for these workers and this placement, which is resident at the start.
        `times` is how long things really take; the scheduler has a copy of its own, which learns from what it sees.
        Raises `ConfigError` when a failure names a worker that does not exist."""
        self._options = options or SimulationOptions()
        self._num_workers = len(workers)
        self._agenda = Agenda()
        self._recorder = Recorder(self._options.keep_plans, self._options.on_progress)
        check_failures(self._options, workers)
        self._cell = SimulatedCell(scheduler, workers, placement, times, self._options, self._agenda, self._recorder)
        self._has_run = False

    def run(self, arrivals: Iterable[TimedRequest], changes: Iterable[ModelChange] = ()) -> SimulationResult:
        """Simulate until all requests have ended (or `end_s`). To be called once. Models that are added are at hand at
        once. Raises `ConfigError` when a request id comes twice."""
        if self._has_run:
            raise ConfigError("a simulated engine runs once: make a new one, with a new scheduler")
        self._has_run = True
        ordered, agenda, cell = order_arrivals(arrivals), self._agenda, self._cell
        with ExitStack() as stack:
            path = self._options.decision_log
            cell.start(stack.enter_context(path.open("w", encoding="utf-8")) if path is not None else None)
            for arrival_s, spec in ordered:
                agenda.call_at(arrival_s, self._arrive, spec)
            for changed_s, change in changes:
                agenda.call_at(changed_s, cell.post, change)
            cell.enter_failures()
            agenda.run(self._options.end_s)
        cell.close()
        return self._recorder.make_result(self._num_workers)

    def _arrive(self, spec: RequestSpec) -> None:
        self._recorder.record_arrival(spec, self._agenda.now_s)
        self._cell.arrive(spec)


def check_failures(options: SimulationOptions, workers: Sequence[WorkerSpec]) -> None:
    """Raises `ConfigError` when a failure names a worker that is not among these."""
    named = {failure.worker_id for failure in options.failures} | {each.worker_id for each in options.failing}
    unknown = sorted(named - {worker.worker_id for worker in workers})
    if unknown:
        raise ConfigError(f"failures name workers that are not in the cluster: {', '.join(unknown)}")


def order_arrivals(arrivals: Iterable[TimedRequest]) -> list[TimedRequest]:
    """The requests of a trace by time of arrival. Raises `ConfigError` when an id comes twice."""
    ordered = sorted(arrivals, key=lambda arrival: arrival[0])
    seen: set[str] = set()
    for arrival_s, spec in ordered:
        if spec.request_id in seen:
            raise ConfigError(f"request id {spec.request_id!r} comes twice, again at {arrival_s} s; ids must differ")
        seen.add(spec.request_id)
    return ordered
