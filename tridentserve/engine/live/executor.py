"""Runs one plan on one worker, in the worker's device thread: the stages of the plan one after another.

The leader runs E and C, and takes all decisions; at degrees above 1 the others get the denoising state from it, and
ask it before every step whether to go on, so that all members stop at the same step boundary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tridentserve.engine.live.messages import Span
from tridentserve.engine.live.parcel import Parcel
from tridentserve.engine.live.replicas import ReplicaStore
from tridentserve.errors import HandoffError
from tridentserve.parallel import GroupCache, SequenceGroup, sequence_parallel
from tridentserve.pipelines.base import DenoisingState, PipelineAdapter
from tridentserve.plans import DispatchPlan, Replica, WorkerId
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage


class _Command(IntEnum):
    GO_ON = 0
    PAUSE = 1
    STOP = 2


class StepControl:
    """How the event loop tells the device thread to stop or to pause a plan, and hears of its steps."""

    def __init__(self, on_step: Callable[[int], None] = lambda steps_done: None) -> None:
        self._stop = threading.Event()
        self._pause = threading.Event()
        self.on_step = on_step

    def stop(self) -> None:
        """Stop before the next step, or before the next stage, and drop what was made."""
        self._stop.set()

    def pause(self) -> None:
        """Stop before the next denoising step and keep the state. What comes after D is not held up."""
        self._pause.set()

    @property
    def command(self) -> _Command:
        """What to do at a step boundary."""
        if self._stop.is_set():
            return _Command.STOP
        return _Command.PAUSE if self._pause.is_set() else _Command.GO_ON

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()


@dataclass(slots=True)
class Execution:
    """What came of a plan on its leader (followers have spans only). `outputs` is for the next plan: a condition, a
    denoising state whose steps are not all done, or final latents. `images` comes of DECODE:
    (num_outputs, height, width, 3) uint8. `stopped`: the plan was stopped on purpose and has no result.
    `paused_after`: it was paused after so many steps of its own; `outputs` is its state then."""

    spans: list[Span] = field(default_factory=list)
    outputs: Parcel | None = None
    images: NDArray[np.uint8] | None = None
    stopped: bool = False
    paused_after: int | None = None


class StageExecutor:
    """Executes plans for one worker. Not thread-safe: one plan at a time."""

    def __init__(self, worker_id: WorkerId, replicas: ReplicaStore, groups: GroupCache) -> None:
        self._worker_id = worker_id
        self._replicas = replicas
        self._groups = groups

    def execute(
        self, plan: DispatchPlan, inputs: GenerationInputs, incoming: Parcel | None, control: StepControl
    ) -> Execution:
        """Run all stages of a plan. `incoming` holds the leader's inputs (None for ENCODE and on followers).

        After any error the other members of the instance do not wait for this one."""
        try:
            return self._execute(plan, inputs, incoming, control)
        except BaseException:
            self.abandon(plan)
            raise

    def abandon(self, plan: DispatchPlan) -> None:
        """Let the other members of a plan know that this one will not run it (to its end)."""
        if plan.group is not None:
            self._groups.abandon(plan.group, plan.workers.index(self._worker_id), use=plan.plan_id)

    def _execute(
        self, plan: DispatchPlan, inputs: GenerationInputs, incoming: Parcel | None, control: StepControl
    ) -> Execution:
        execution = Execution()
        is_leader = plan.leader == self._worker_id
        for stage in plan.stages:
            if stage is not Stage.DIFFUSE and not is_leader:
                continue
            adapter = self._replicas.adapter(Replica(plan.model, stage))
            if stage is Stage.DIFFUSE:
                incoming = self._diffuse(plan, adapter, inputs, incoming, control, execution)
                if incoming is None or (is_leader and control.stopped):
                    return Execution(execution.spans, stopped=True)
                if execution.paused_after is not None:
                    break
                continue
            with _timed(stage, execution):
                if stage is Stage.ENCODE:
                    incoming = Parcel(adapter.encode(inputs))
                else:
                    execution.images = adapter.decode(_required(incoming, plan).tensors, inputs)
                    incoming = None
        execution.outputs = incoming if is_leader else None
        return execution

    def _diffuse(
        self,
        plan: DispatchPlan,
        adapter: PipelineAdapter,
        inputs: GenerationInputs,
        incoming: Parcel | None,
        control: StepControl,
        execution: Execution,
    ) -> Parcel | None:
        """The plan's range of denoising steps; None when it was stopped."""
        first, last = plan.sole.steps or (0, inputs.num_inference_steps)
        group = self._group(plan)
        state = None
        if plan.leader == self._worker_id:
            given = _required(incoming, plan)
            state = _state_of(given) if _is_state(given) else adapter.prepare(given.tensors, inputs)
        if group is not None:
            state = _shared(state, group)
        if state is None or state.step != first:
            raise HandoffError(f"plan {plan.plan_id} starts at step {first}, its state is at {state and state.step}")
        # Timed from here: the cost model learns seconds per step from it, not how long members waited for each other.
        with _timed(Stage.DIFFUSE, execution), sequence_parallel(group):
            while state.step < last:
                command = control.command if group is None else group.agree(control.command)
                if command == _Command.STOP:
                    return None
                if command == _Command.PAUSE:
                    execution.paused_after = state.step - first
                    return _parcel_of(state)
                state = adapter.step(state)
                control.on_step(state.step)
        return Parcel(adapter.latents(state)) if state.step == state.num_steps else _parcel_of(state)

    def _group(self, plan: DispatchPlan) -> SequenceGroup | None:
        if plan.group is None:
            return None
        rank = plan.workers.index(self._worker_id)
        return self._groups.acquire(plan.group, rank, plan.degree, use=plan.plan_id)


@contextmanager
def _timed(stage: Stage, execution: Execution) -> Iterator[None]:
    """Add the span of a stage. Its length is by a clock that is never set back."""
    start_s, began_s = time.time(), time.perf_counter()
    yield
    execution.spans.append(Span(stage, start_s, start_s + time.perf_counter() - began_s))


def _required(incoming: Parcel | None, plan: DispatchPlan) -> Parcel:
    if incoming is None:
        raise HandoffError(f"plan {plan.plan_id} of request {plan.sole.request_id} has no inputs")
    return incoming


def _parcel_of(state: DenoisingState) -> Parcel:
    return Parcel(state.tensors, {"step": state.step, "num_steps": state.num_steps, "values": state.values})


def _is_state(parcel: Parcel) -> bool:
    """A denoising state, not a condition."""
    return "step" in parcel.values


def _state_of(parcel: Parcel) -> DenoisingState:
    values = parcel.values
    return DenoisingState(values["step"], values["num_steps"], dict(parcel.tensors), values["values"])


def _shared(state: DenoisingState | None, group: SequenceGroup) -> DenoisingState:
    """The leader's state on all members of the group; others pass None."""
    parcel = _parcel_of(state) if state is not None else Parcel({})
    values = group.broadcast_json(parcel.values)
    tensors = group.broadcast_tensors(parcel.tensors if state is not None else None)
    return _state_of(Parcel(tensors, values)) if state is None else state
