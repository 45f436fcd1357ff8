"""Checkpoints of denoising states on other workers, made at the step boundaries at which live workers make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tridentserve.engine.simulated.agenda import Agenda
from tridentserve.engine.simulated.recorder import Recorder
from tridentserve.engine.simulated.workers.devices import Devices, PlanRun
from tridentserve.engine.simulated.workers.handoff import Handoff
from tridentserve.plans import StageSpan
from tridentserve.scheduling import events as ev
from tridentserve.stages import Stage


class SimulatedCheckpoints:
    """Workers compute while checkpoints are sent. A checkpoint that has not arrived when its plan ends, or a worker is
    lost, is of no use."""

    def __init__(
        self,
        agenda: Agenda,
        devices: Devices,
        handoff: Handoff,
        recorder: Recorder,
        post: Callable[[ev.Event], None],
        runs: Mapping[int, PlanRun],
    ) -> None:
        """`runs`: the plans that have not ended, by id."""
        self._agenda = agenda
        self._devices = devices
        self._handoff = handoff
        self._recorder = recorder
        self._post = post
        self._runs = runs

    def enter(self, run: PlanRun) -> None:
        """Enter the next checkpoint of a plan into the agenda, as the times of its stages are known or were moved."""
        saves = run.plan.saves
        if saves is None:
            return
        diffuse = next((span for span in run.spans if span.stage is Stage.DIFFUSE), None)
        if diffuse is None:  # it stops before D
            return
        steps = run.plan.num_steps if run.num_steps is None else run.num_steps
        due = saves.first if run.saved_steps < saves.first else run.saved_steps + saves.every
        if due < steps:
            at_s = max(self._agenda.now_s, diffuse.start_s + due * diffuse.seconds / steps)
            self._agenda.call_at(at_s, self._save, run, run.version, due)

    def _save(self, run: PlanRun, version: int, steps: int) -> None:
        saves = run.plan.saves
        if run.version != version or saves is None:
            return
        run.saved_steps = steps
        now_s = self._agenda.now_s
        spans = tuple(
            replace(span, end_s=now_s, steps=steps) if span.stage is Stage.DIFFUSE else span
            for span in run.spans
            if span.start_s < now_s
        )
        keeper = self._devices[saves.keeper]
        if keeper.alive:
            arrives_s = now_s + self._handoff.checkpoint_seconds(run, saves.keeper)
            self._agenda.call_at(arrives_s, self._arrive, run, steps, spans, keeper.incarnation)
        self.enter(run)

    def _arrive(self, run: PlanRun, steps: int, spans: tuple[StageSpan, ...], incarnation: int) -> None:
        saves = run.plan.saves
        if saves is None or run.plan.plan_id not in self._runs:
            return
        keeper = self._devices[saves.keeper]
        if not keeper.alive or keeper.incarnation != incarnation:
            return
        for member, spec in zip(run.plan.members, run.specs, strict=True):
            if member.steps is not None and not self._recorder.has_ended(spec.request_id):
                self._handoff.save(run.plan.plan_id, spec, keeper.worker_id, member.steps[0] + steps)
        self._recorder.record_checkpoint(run, spans)
        self._post(ev.CheckpointSaved(run.plan.plan_id, steps, keeper.worker_id, spans))
