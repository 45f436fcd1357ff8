"""Executes plans on the simulated workers: queues, loads, inputs, stages, stops and failures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tridentserve.engine.simulated.agenda import Agenda
from tridentserve.engine.simulated.options import FailingWorker, SimulationOptions
from tridentserve.engine.simulated.recorder import Recorder
from tridentserve.engine.simulated.result import PlanOutcome
from tridentserve.engine.simulated.workers.actual_times import ActualTimes
from tridentserve.engine.simulated.workers.checkpoints import SimulatedCheckpoints
from tridentserve.engine.simulated.workers.contention import Contention
from tridentserve.engine.simulated.workers.devices import Devices, PlanRun
from tridentserve.engine.simulated.workers.handoff import Handoff
from tridentserve.engine.simulated.workers.loading import SimulatedLoading
from tridentserve.errors import ProfileError
from tridentserve.plans import DispatchPlan, StageSpan, WorkerId
from tridentserve.scheduling import events as ev
from tridentserve.stages import Stage

# Rounding of times must not move a stop to the next step boundary.
_STEP_TOLERANCE = 1e-9


class Executor:
    """Runs each worker's plans in the order in which they are given. Reports go to `post`, after the fact."""

    def __init__(
        self,
        agenda: Agenda,
        devices: Devices,
        handoff: Handoff,
        times: ActualTimes,
        recorder: Recorder,
        post: Callable[[ev.Event], None],
        options: SimulationOptions,
    ) -> None:
        self._agenda = agenda
        self._devices = devices
        self._handoff = handoff
        self._times = times
        self._recorder = recorder
        self._post = post
        self._options = options
        self._loading = SimulatedLoading(agenda, devices, times, recorder, post)
        self._contention = (
            Contention(agenda, options.slowdown, options.wide_slowdown, self._enter_end) if options.slowdown else None
        )
        self._groups: set[str] = set()
        self._runs: dict[int, PlanRun] = {}
        self._checkpoints = SimulatedCheckpoints(agenda, devices, handoff, recorder, post, self._runs)

    # Plans are queued and stopped.

    def run(self, plan: DispatchPlan) -> None:
        """Queue a plan on its workers."""
        self._recorder.counts.plans += 1
        devices = tuple([self._devices[worker_id] for worker_id in plan.workers])
        dead = [device.worker_id for device in devices if not device.alive]
        if dead:
            self._refuse(ev.PlanFailed(plan.plan_id, f"{'+'.join(dead)} is down"))
            return
        specs = tuple([self._recorder.get_made_spec(member.request_id) for member in plan.members])
        try:
            demand = self._times.estimate_demand(plan, specs)
        except ProfileError as error:
            self._refuse(ev.PlanFailed(plan.plan_id, str(error), retry=False, code=error.code))
            return
        run = PlanRun(plan, specs, devices, demand, ready_s=self._agenda.now_s + self._options.plan_overhead_s)
        self._runs[plan.plan_id] = run
        for device in devices:
            device.queue.append(run)
            run.heads += device.queue[0] is run
        if run.heads == len(devices):
            self._start_when_ready(run)

    def _refuse(self, failure: ev.PlanFailed) -> None:
        """A plan that cannot even be queued."""
        self._recorder.counts.failed_plans += 1
        self._post(failure)

    def abort(self, plan_id: int) -> None:
        """Stop a plan at its next step boundary and drop its outputs."""
        run = self._runs.get(plan_id)
        if run is None:
            return
        if run.started_s is None:
            self._leave(run)
            self._post(ev.PlanStopped(plan_id))
            return
        run.aborted = True
        self._cut(run)

    def yield_(self, plan_id: int) -> None:
        """Stop a plan at its next step boundary and keep its outputs. One that is past its last boundary continues."""
        run = self._runs.get(plan_id)
        if run is None or Stage.DIFFUSE not in run.plan.stages:
            return
        if run.started_s is not None:
            self._cut(run)
        elif run.plan.takes_over is not None and run.plan.stages[0] is Stage.DIFFUSE:
            run.num_steps = 0  # what it is given goes through it
        else:
            self._leave(run)
            self._recorder.counts.yields += 1
            self._post(ev.StageFinished(plan_id, (), num_steps=0))

    # A log is followed.

    def holds(self, plan_id: int) -> bool:
        """True while a plan waits or runs."""
        return plan_id in self._runs

    def settle(self, event: ev.StageFinished | ev.PlanStopped | ev.PlanFailed) -> None:
        """A plan has ended like this, however far it has come here."""
        run = self._runs.get(event.plan_id)
        if run is None:
            return
        if isinstance(event, ev.StageFinished):
            run.spans, run.num_steps = event.spans, event.num_steps
            if run.spans:
                self._handoff.keep(run, self._agenda.now_s)
        self._leave(run)

    def correct(self, plan_id: int, spans: tuple[StageSpan, ...]) -> None:
        """The stages of a plan that has started take these times."""
        run = self._runs.get(plan_id)
        if run is not None and run.started_s is not None:
            run.spans = spans
            self._enter_end(run, spans[-1].end_s)

    def note_load(self, event: ev.ReplicaLoaded) -> None:
        """A worker has loaded a replica, whether it did here or not."""
        device = self._devices[event.worker_id]
        self._devices.drop(device, event.evicted)
        if event.loaded not in device.resident:
            self._devices.add(device, event.loaded)

    # Workers go and come back.

    def lose(self, worker_id: WorkerId) -> None:
        """A worker's process ends."""
        device = self._devices[worker_id]
        if not device.alive:
            return
        device.alive = False
        self._recorder.counts.worker_losses += 1
        self._devices.clear(device)
        self._handoff.lose(worker_id, self._agenda.now_s)
        failed = list(device.queue)
        for run in failed:
            self._record(run, "failed")
            self._leave(run)
        self._post(ev.WorkerLost(worker_id, f"{worker_id} was lost"))
        for run in failed:
            self._post(ev.PlanFailed(run.plan.plan_id, f"{worker_id} was lost"))

    def join(self, worker_id: WorkerId) -> None:
        """A lost worker is back, with the replicas of its placement."""
        device = self._devices[worker_id]
        if device.alive:
            return
        device.alive = True
        device.incarnation += 1
        self._devices.fill(device)
        self._post(ev.WorkerJoined(device.spec, device.incarnation))

    # A plan starts.

    def _start_when_ready(self, run: PlanRun) -> None:
        """Start a plan that is first on all its workers, once they know of it and what was pushed to it is there. A
        worker whose last plan has failed elsewhere may still be loading for it, and ends that first."""
        ready_s = max(run.ready_s, self._handoff.ready_s(run), *(device.loading_until_s for device in run.devices))
        if ready_s > self._agenda.now_s:
            self._agenda.call_at(ready_s, self._start, run, run.version)
        else:
            self._start(run, run.version)

    def _start(self, run: PlanRun, version: int) -> None:
        if run.version != version:
            return
        now_s = run.started_s = self._agenda.now_s
        if run.plan.takes_over is not None and not self._begin_taken_over(run):
            self._agenda.call_at(now_s, self._end_without_inputs, run, run.version)
            return
        if run.num_steps is not None:
            run.spans = (StageSpan(Stage.DIFFUSE, now_s, now_s, run.plan.workers, 0),)
            self._enter_end(run, now_s)
            return
        if failing := [each for each in self._options.failing if self._is_failed_by(each, run)]:
            after_s, names = min(each.after_s for each in failing), tuple(each.worker_id for each in failing)
            why = f"the device of {'+'.join(names)} is broken"
            self._agenda.call_at(now_s + after_s, self._fail, run, run.version, why, True, "worker_failed", names)
            return
        wanted = [member for member in run.plan.members if not self._recorder.has_ended(member.request_id)]
        if missing := self._handoff.list_missing(wanted):
            self._fail_soon(run, f"the inputs of {', '.join(missing)} are gone", retry=True, code="worker_failed")
            return
        if (
            self._options.decodes_in_tiles
            and run.demand.frugal is not None
            and self._loading.find_memory_error(run) is not None
        ):
            run.demand = run.demand.frugal
            self._recorder.counts.frugal_plans += 1
        if (error := self._loading.find_memory_error(run)) is not None:
            self._recorder.counts.out_of_memory += 1
            self._fail_soon(run, str(error), retry=False, code=error.code)
            return
        # Weights and inputs come at the same time.
        prepared_s = self._handoff.take(run)
        used_bytes = []
        for device, demand in zip(run.devices, run.demand.ranks, strict=True):
            used_bytes.append(self._devices.make_room(device, demand))
            prepared_s = max(prepared_s, self._loading.load(device, demand.replicas))
        run.used_bytes = tuple(used_bytes)
        end_s = now_s + prepared_s + self._take_group_seconds(run.plan)
        spans = []
        for stage, stage_s, degree in zip(run.plan.stages, run.demand.seconds, run.demand.degrees, strict=True):
            begin_s = end_s
            steps = run.plan.num_steps if stage is Stage.DIFFUSE else None
            end_s += stage_s * (1 if steps is None else steps) * self._times.draw_jitter(run.plan, stage)
            spans.append(StageSpan(stage, begin_s, end_s, run.plan.workers[:degree], steps))
        run.spans = tuple(spans)
        self._enter_end(run, end_s)
        if self._contention is not None:
            self._agenda.call_at(spans[0].start_s, self._contention.begin, run, run.version)

    def _begin_taken_over(self, run: PlanRun) -> bool:
        """The plan that this one takes over has ended: its members begin where that has left them. Requests that it has
        ended with are not part of a plan with D, and those that it has not ended with of C alone. False where nobody is
        left."""
        begun: dict[str, int] = {}
        for member, spec in zip(run.plan.members, run.specs, strict=True):
            if not member.inherited:
                begun[spec.request_id] = member.steps[0] if member.steps is not None else 0
            elif member.steps is None:
                if self._handoff.has_latents(member):
                    begun[spec.request_id] = spec.num_inference_steps
            elif (steps_done := self._handoff.find_begun(member)) is not None:
                begun[spec.request_id] = steps_done
        if not begun:
            return False
        if Stage.DIFFUSE in run.plan.stages:
            totals = {spec.request_id: spec.num_inference_steps for spec in run.specs}
            run.plan = run.plan.correct_steps(begun, totals)
        else:
            run.plan = replace(run.plan, members=tuple(each for each in run.plan.members if each.request_id in begun))
        run.specs = tuple(spec for spec in run.specs if spec.request_id in begun)
        run.demand = self._times.estimate_demand(run.plan, run.specs)
        return True

    def _end_without_inputs(self, run: PlanRun, version: int) -> None:
        """End a plan that has nothing to continue with."""
        if run.version == version:
            self._leave(run)
            self._post(ev.PlanStopped(run.plan.plan_id))

    def _enter_end(self, run: PlanRun, end_s: float) -> None:
        run.version += 1
        run.end_s = end_s
        self._agenda.call_at(end_s, self._end, run, run.version)
        self._checkpoints.enter(run)

    def _take_group_seconds(self, plan: DispatchPlan) -> float:
        if plan.group is None or plan.group in self._groups:
            return 0.0
        self._groups.add(plan.group)
        self._recorder.counts.groups_made += 1
        return self._options.group_setup_s

    # A plan ends.

    def _cut(self, run: PlanRun) -> None:
        """Move the end of a started plan to its next step boundary, if it has one before its end."""
        if run.num_steps is not None:  # it is stopping already
            return
        now_s = self._agenda.now_s
        index = next((i for i, span in enumerate(run.spans) if span.stage is Stage.DIFFUSE), None)
        if index is None or now_s >= run.spans[index].end_s:
            return
        diffuse, total = run.spans[index], run.plan.num_steps
        spans = run.spans[:index]
        if now_s <= run.spans[0].start_s:  # weights or inputs are still on their way
            num_steps, spans, end_s = 0, (), run.spans[0].start_s
        elif now_s <= diffuse.start_s:
            num_steps, end_s = 0, diffuse.start_s
        else:
            step_s = diffuse.seconds / total
            num_steps = max(1, math.ceil((now_s - diffuse.start_s) / step_s - _STEP_TOLERANCE))
            if num_steps >= total and not run.aborted:
                return  # in its last step: there is no boundary before the end
            end_s = max(now_s, min(diffuse.start_s + num_steps * step_s, diffuse.end_s))
            spans = (*spans, replace(diffuse, end_s=end_s, steps=num_steps))
        run.num_steps, run.spans = num_steps, spans
        self._enter_end(run, end_s)

    def _end(self, run: PlanRun, version: int) -> None:
        if run.version != version:
            return
        plan_id, now_s = run.plan.plan_id, self._agenda.now_s
        if run.aborted:
            self._record(run, "stopped")
            self._leave(run)
            self._report(run, ev.PlanStopped(plan_id))
            return
        if run.spans:
            self._handoff.keep(run, now_s)
        self._recorder.counts.yields += run.num_steps is not None
        self._record(run, "finished" if run.num_steps is None else "yielded")
        self._leave(run)
        loras = self._devices.hold_loras(run, self._options.held_loras) if Stage.DIFFUSE in run.plan.stages else ()
        num_steps = run.num_steps if run.plan.takes_over is None else run.steps_done
        self._report(run, ev.StageFinished(plan_id, run.spans, num_steps, loras))

    def _report(self, run: PlanRun, event: ev.Event) -> None:
        """Report the end of a plan to the scheduler. Its workers continue meanwhile."""
        options, delay_s = self._options, self._options.report_overhead_s
        if Stage.DECODE in run.plan.stages:
            delay_s += sum(options.image_s_per_pixel * s.shape.pixels * s.num_outputs for s in run.specs)
        if delay_s:
            self._agenda.call_at(self._agenda.now_s + delay_s, self._post, event)
        else:
            self._post(event)

    def _fail_soon(self, run: PlanRun, error: str, retry: bool, code: str) -> None:
        """Fail a plan now, but not from within its start: many plans in a row may fail."""
        self._agenda.call_at(self._agenda.now_s, self._fail, run, run.version, error, retry, code)

    def _is_failed_by(self, failing: FailingWorker, run: PlanRun) -> bool:
        return failing.worker_id in run.plan.workers and failing.begin_s <= self._agenda.now_s < failing.end_s

    def _fail(
        self, run: PlanRun, version: int, error: str, retry: bool, code: str, workers: tuple[WorkerId, ...] = ()
    ) -> None:
        if run.version != version:
            return
        self._record(run, "failed")
        self._leave(run)
        self._post(ev.PlanFailed(run.plan.plan_id, error, retry, code, workers))

    def close(self) -> None:
        """The simulation ends: give the recorder the plans that still run."""
        for run in self._runs.values():
            if run.started_s is not None:
                self._record(run, "unfinished")

    def _record(self, run: PlanRun, outcome: PlanOutcome) -> None:
        """Give the recorder a plan that ends now."""
        now_s = self._agenda.now_s
        if outcome in ("failed", "unfinished"):
            run.spans = tuple(replace(s, end_s=min(s.end_s, now_s)) for s in run.spans if s.start_s < now_s)
        self._recorder.counts.failed_plans += outcome == "failed"
        self._recorder.record_run(run, now_s, outcome)

    def _leave(self, run: PlanRun) -> None:
        """Take a plan out of its workers' queues; those that are first everywhere now start."""
        run.version += 1
        if self._contention is not None:
            self._contention.end(run)
        del self._runs[run.plan.plan_id]
        first = []
        for device in run.devices:
            queue = device.queue
            if queue[0] is not run:
                queue.remove(run)
                continue
            queue.popleft()
            if queue and device.alive:
                queue[0].heads += 1
                if queue[0].heads == len(queue[0].devices):
                    first.append(queue[0])
        for successor in first:
            self._start_when_ready(successor)
