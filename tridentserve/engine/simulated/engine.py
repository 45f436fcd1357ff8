"""The simulated engine: effects of the scheduler become timed calls, and their outcomes become events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import IO

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated.actual_times import ActualTimes
from tridentserve.engine.simulated.agenda import Agenda
from tridentserve.engine.simulated.core import SimulatedCore
from tridentserve.engine.simulated.devices import Devices
from tridentserve.engine.simulated.execution import Executor
from tridentserve.engine.simulated.handoff import Handoff
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
        self._scheduler = scheduler
        self._placement = placement
        self._num_workers = len(workers)
        self._agenda = Agenda()
        actual = self._times = ActualTimes(times, self._options.jitter, self._options.seed)
        self._devices = Devices(workers, actual, self._options.reserve_bytes)
        self._handoff = Handoff(self._devices, actual, self._options.handoff_capacity_bytes)
        self._recorder = Recorder(self._options.keep_plans, self._options.on_progress)
        self._has_run = False
        failing = {failure.worker_id for failure in self._options.failures}
        unknown = sorted(worker_id for worker_id in failing if worker_id not in self._devices)
        if unknown:
            raise ConfigError(f"failures name workers that are not in the cluster: {', '.join(unknown)}")

    def run(self, arrivals: Iterable[TimedRequest], changes: Iterable[ModelChange] = ()) -> SimulationResult:
        """Simulate until all requests have ended (or `end_s`). To be called once. Models that are added are at hand at
        once. Raises `ConfigError` when a request id comes twice."""
        if self._has_run:
            raise ConfigError("a simulated engine runs once: make a new one, with a new scheduler")
        self._has_run = True
        with ExitStack() as stack:
            path = self._options.decision_log
            log = stack.enter_context(path.open("w", encoding="utf-8")) if path is not None else None
            self._simulate(sorted(arrivals, key=lambda arrival: arrival[0]), list(changes), log)
        counts = self._recorder.counts
        counts.transfers, counts.transfer_bytes = self._handoff.transfers, self._handoff.transfer_bytes
        counts.spills = self._handoff.spills
        return self._recorder.make_result(self._num_workers)

    def _simulate(self, arrivals: list[TimedRequest], changes: list[ModelChange], log: IO[str] | None) -> None:
        _check_distinct(arrivals)
        core = SimulatedCore(self._scheduler, self._agenda, self._carry_out, self._options, self._recorder.counts, log)
        self._executor = Executor(
            self._agenda,
            self._devices,
            self._handoff,
            self._times,
            self._recorder,
            core.post,
            self._options,
        )
        self._devices.place(self._placement)
        self._recorder.record_placement(self._placement, 0.0)
        for device in self._devices:
            self._devices.fill(device)
            self._agenda.call_at(0.0, core.post, ev.WorkerJoined(device.spec))
        for arrival_s, spec in arrivals:
            self._agenda.call_at(arrival_s, self._arrive, core, spec)
        for changed_s, change in changes:
            self._agenda.call_at(changed_s, core.post, change)
        for failure in self._options.failures:
            self._agenda.call_at(failure.time_s, self._executor.lose, failure.worker_id)
            self._agenda.call_at(failure.time_s + failure.down_s, self._executor.join, failure.worker_id)
        self._agenda.run(self._options.end_s)
        self._executor.close()

    def _arrive(self, core: SimulatedCore, spec: RequestSpec) -> None:
        self._recorder.record_arrival(spec, self._agenda.now_s)
        core.post(ev.RequestArrived(spec))

    def _carry_out(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        recorder, now_s = self._recorder, self._agenda.now_s
        for effect in effects:
            match effect:
                case ev.RunPlan():
                    if isinstance(event, ev.Tick):
                        recorder.record_assignment(effect)
                    self._executor.run(effect.plan)
                case ev.Abort():
                    self._executor.abort(effect.plan_id)
                case ev.Yield():
                    self._executor.yield_(effect.plan_id)
                case ev.Place():
                    recorder.counts.switches += 1
                    recorder.record_placement(effect.plan, now_s)
                    self._devices.place(effect.plan)
                case ev.Requeue():
                    recorder.record_requeue(effect)
                    if effect.steps_done:
                        self._handoff.drop_outputs(effect.request_id)
                    else:
                        self._handoff.drop(effect.request_id)
                case ev.Unload():
                    self._devices.unload(effect.model)
                case ev.Finish() | ev.Reject():
                    recorder.record_end(effect, now_s)
                    self._handoff.drop(effect.request_id)


def _check_distinct(arrivals: list[TimedRequest]) -> None:
    seen: set[str] = set()
    for arrival_s, spec in arrivals:
        if spec.request_id in seen:
            raise ConfigError(f"request id {spec.request_id!r} comes twice, again at {arrival_s} s; ids must differ")
        seen.add(spec.request_id)
