"""One scheduler and its simulated workers: effects become timed calls, and their outcomes become events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated.agenda import Agenda
from tridentserve.engine.simulated.core import SimulatedCore
from tridentserve.engine.simulated.options import SimulationOptions
from tridentserve.engine.simulated.recorder import Recorder
from tridentserve.engine.simulated.workers.actual_times import ActualTimes, TimeFactors
from tridentserve.engine.simulated.workers.devices import Devices
from tridentserve.engine.simulated.workers.execution import Executor
from tridentserve.engine.simulated.workers.handoff import Handoff
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.tick_pacer import SchedulerLike


class SimulatedCell:
    """The scheduler and the workers of a service, or of one cell of it. The agenda and the recorder are the
    simulation's."""

    def __init__(
        self,
        scheduler: SchedulerLike,
        workers: Sequence[WorkerSpec],
        placement: PlacementPlan,
        times: StageTimes,
        options: SimulationOptions,
        agenda: Agenda,
        recorder: Recorder,
        factors: TimeFactors | None = None,
    ) -> None:
        """See `SimulatedEngine`; `factors`: see `ActualTimes`."""
        self._agenda = agenda
        self._recorder = recorder
        self._workers = tuple(workers)
        self._placement = placement
        self._failures = options.failures
        actual = ActualTimes(times, options.jitter, options.seed, factors)
        self._devices = Devices(workers, actual, options.reserve_bytes)
        self._handoff = Handoff(self._devices, actual, options.handoff_capacity_bytes)
        self._core = SimulatedCore(scheduler, agenda, self._carry_out, options, recorder.counts)
        self._executor = Executor(agenda, self._devices, self._handoff, actual, recorder, self._core.post, options)
        # Requests that have not ended.
        self._open: dict[str, None] = {}
        self.num_received = 0
        """Number of requests that the scheduler has taken in. One that comes while it decides is taken in later."""

    def start(self, log: IO[str] | None = None) -> None:
        """All workers join, with their placement in memory. Decisions are written to `log`."""
        self._core.log = log
        self.prepare()
        for device in self._devices:
            self._agenda.call_at(self._agenda.now_s, self._core.post, ev.WorkerJoined(device.spec))

    def prepare(self) -> None:
        """The workers get their placement into memory."""
        self._devices.place(self._placement)
        self._recorder.record_placement(self._placement, self._agenda.now_s)
        for device in self._devices:
            self._devices.fill(device)

    def follow(self, event: ev.Event, at_s: float) -> list[ev.Effect]:
        """An event of a log, which happens now: the scheduler takes it in, and the workers carry out what it decides.
        Plans end here when they do in the log."""
        match event:
            case ev.RequestArrived():
                self._open[event.spec.request_id] = None
            case ev.StageFinished() | ev.PlanStopped() | ev.PlanFailed():
                self._executor.settle(event)
            case ev.ReplicaLoaded():
                self._executor.note_load(event)
            case _:
                self._move_worker(event)
        return self._core.follow(event, at_s)

    def take_over(self, under_way: Mapping[int, ev.StageFinished | None], reports: Mapping[int, float]) -> None:
        """From now on the scheduler and the workers go on by themselves. `under_way`: the plans that have been sent and
        not reported, with the reports that the log has of them later, at the times `reports`."""
        for plan_id, report in under_way.items():
            if report is None or report.num_steps is not None:
                continue
            if self._executor.holds(plan_id):
                self._executor.correct(plan_id, report.spans)
            else:
                self._agenda.call_at(reports[plan_id], self._core.post, report)
        self._core.take_over()

    def change(self, event: ev.Event) -> None:
        """Something of a log happens that is none of the workers' reports: to the scheduler, and to a worker that it is
        about."""
        if not self._move_worker(event):
            self._core.post(event)

    def _move_worker(self, event: ev.Event) -> bool:
        """A worker goes or comes back. False for other events, and for a worker that comes for the first time."""
        if isinstance(event, ev.WorkerLost):
            self._executor.lose(event.worker_id)
            return True
        if isinstance(event, ev.WorkerJoined) and event.incarnation:
            self._executor.join(event.worker.worker_id)
            return True
        return False

    def arrive(self, spec: RequestSpec) -> None:
        """A request of the recorder's arrives."""
        self._open[spec.request_id] = None
        self._core.post(ev.RequestArrived(spec))

    def post(self, event: ev.Event) -> None:
        """An event happens now."""
        self._core.post(event)

    def enter_failures(self) -> None:
        """Enter the failures of the options that are of its workers."""
        for failure in self._failures:
            if failure.worker_id in self._devices:
                self._agenda.call_at(failure.time_s, self._executor.lose, failure.worker_id)
                self._agenda.call_at(failure.time_s + failure.down_s, self._executor.join, failure.worker_id)

    def lose(self) -> list[str]:
        """The scheduler and all workers are gone for good. Returns the requests that had not ended."""
        self._core.stop()
        for worker in self._workers:
            self._executor.lose(worker.worker_id)
        lost = list(self._open)
        self._open.clear()
        return lost

    def close(self) -> None:
        """The simulation ends."""
        self._executor.close()
        counts, handoff = self._recorder.counts, self._handoff
        counts.transfers += handoff.transfers
        counts.transfer_bytes += handoff.transfer_bytes
        counts.spills += handoff.spills

    def _carry_out(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        recorder, now_s = self._recorder, self._agenda.now_s
        self.num_received += isinstance(event, ev.RequestArrived)
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
                case ev.Degrade():
                    recorder.record_degrading(effect)
                case ev.Unload():
                    self._devices.unload(effect.model)
                case ev.Finish() | ev.Reject():
                    self._open.pop(effect.request_id, None)
                    recorder.record_end(effect, now_s)
                    self._handoff.drop(effect.request_id)
