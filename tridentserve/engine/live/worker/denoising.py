"""Runs D of a plan on one of its workers, step by step, and stops or pauses it at a step boundary on request."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from enum import IntEnum

import torch

from tridentserve.engine.live.previews.due_previews import DuePreviews
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.worker.checkpoint_writer import Checkpoint
from tridentserve.errors import HandoffError, InvalidRequestError
from tridentserve.parallel import SequenceGroup, StepPatience, sequence_parallel
from tridentserve.pipelines.base import CACHE_LIMIT, SKIPPED_STEPS, DenoisingState, PipelineAdapter
from tridentserve.plans import DispatchPlan, StageSpan
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

logger = logging.getLogger(__name__)


class StepCommand(IntEnum):
    """The action of a plan at a step boundary."""

    CONTINUE = 0
    PAUSE = 1
    STOP = 2


class StepControl:
    """Through this the event loop asks the device thread to stop or to pause a plan, and learns of its steps."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._pause = threading.Event()
        self._watch = threading.Event()
        # Called when the first stage begins.
        self.on_begin: Callable[[], object] = lambda: None
        # Called on the leader, while the plan is watched, with each request and how many of its steps are done.
        self.on_step: Callable[[str, int], None] = lambda request_id, steps_done: None
        # Called on the leader, while the plan is watched, with each preview that is due: the request, how many of its
        # steps are done, and its sketch.
        self.on_preview: Callable[[str, int, torch.Tensor], object] = lambda request_id, steps_done, sketch: None
        # Called on the leader with each state checkpoint that the plan asks for.
        self.on_checkpoint: Callable[[Checkpoint], object] = lambda checkpoint: None

    def ask_to_stop(self) -> None:
        """Have the plan stop before the next step, or before the next stage, without outputs."""
        self._stop.set()

    def ask_to_pause(self) -> None:
        """Have the plan stop before the next denoising step and keep its states. Stages after D are not held up."""
        self._pause.set()

    def ask_to_tell(self) -> None:
        """Have the leader tell of the steps from now on."""
        self._watch.set()

    @property
    def command(self) -> StepCommand:
        """The command for the next step boundary."""
        if self._stop.is_set():
            return StepCommand.STOP
        return StepCommand.PAUSE if self._pause.is_set() else StepCommand.CONTINUE

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    @property
    def watched(self) -> bool:
        return self._watch.is_set()


class Denoising:
    """Runs D of the members of a plan. At degrees above 1 all workers of the group run the same steps together."""

    def __init__(
        self,
        plan: DispatchPlan,
        adapter: PipelineAdapter,
        group: SequenceGroup | None,
        control: StepControl,
        hang_timeout_s: float | None = None,
    ) -> None:
        """`group` is made of the workers of the plan; None at degree 1. The first of them leads the plan.
        `hang_timeout_s`: see `StageExecutor`."""
        self._plan = plan
        self._adapter = adapter
        self._group = group
        self._control = control
        self._hang_timeout_s = hang_timeout_s
        self._is_leader = group is None or group.rank == 0
        self._is_mixed = False
        self._states: dict[str, DenoisingState] = {}
        self._begun: dict[str, int] = {}  # the steps of each state that earlier plans have done
        self._previews = DuePreviews({}, time.monotonic)
        self.stopped = False
        """The plan was stopped on purpose, and has no outputs."""
        self.paused_after: int | None = None
        """The plan was paused after this number of its own steps."""

    def share_states(self, inputs: Mapping[str, GenerationInputs], given: Mapping[str, Parcel]) -> None:
        """Begin with the states that the leader makes of the outputs `given` by the members' previous plans. `inputs`
        has the members that have not ended."""
        self._is_mixed = len({content.shape for content in inputs.values()}) > 1
        if self._is_leader:
            self._states = self._make_starting_states(inputs, given)
            self._previews = DuePreviews(inputs, time.monotonic)
        if self._group is not None:
            self._states = _broadcast_states(self._states, self._group, self._is_leader)
        self._begun = {name: state.step for name, state in self._states.items()}
        if self._plan.takes_over is not None and self._states:
            totals = {name: state.num_steps for name, state in self._states.items()}
            self._plan = self._plan.correct_steps(self._begun, totals)

    @property
    def num_steps(self) -> int:
        """Denoising steps that each member does, unless the plan is stopped or paused before."""
        return self._plan.num_steps if self._states or self._plan.takes_over is None else 0

    @property
    def is_empty(self) -> bool:
        """True where the plan that is taken over has left nobody with steps left, and nobody joins."""
        return self._plan.takes_over is not None and not self._states

    def list_taken_steps(self) -> dict[str, tuple[int, int]]:
        """See `PlanReport.taken_steps`."""
        if self._plan.takes_over is None:
            return {}
        return {name: (self._begun[name], state.step) for name, state in self._states.items()}

    def hold_loras(self) -> None:
        """Have the LoRAs of all members on the device."""
        self._adapter.hold_loras(list(self._states.values()))

    def run_steps(self, before: Sequence[StageSpan]) -> None:
        """Do the plan's denoising steps for all members, up to a stop or a pause. `before`: the spans of the plan's
        stages before D."""
        began_s = time.time()
        with sequence_parallel(self._group), ExitStack() as stack:
            batches = self._find_batches()
            patience = stack.enter_context(self._bound_waits(batches))
            for done in range(self.num_steps):
                command = self._control.command if self._group is None else self._group.agree(self._control.command)
                if patience is not None:
                    patience.note_boundary()
                if command == StepCommand.STOP:
                    self.stopped = True
                    return
                if command == StepCommand.PAUSE:
                    self.paused_after = done
                    return
                if done > 0:
                    self._report_step()
                for members in batches:
                    self._advance(members)
                if self._is_leader and self._plan.is_saved_after(done + 1):
                    self._control.on_checkpoint(self._make_checkpoint(done + 1, before, began_s))
            if patience is not None and all(
                self._begun[name] == 0 and state.step == state.num_steps for name, state in self._states.items()
            ):
                patience.note_all_steps()

    def _bound_waits(self, batches: Sequence[Sequence[str]]) -> AbstractContextManager[StepPatience | None]:
        if self._group is None or self._hang_timeout_s is None:
            return nullcontext()
        sizes = sorted((str(self._adapter.batch_key(self._states[names[0]])), len(names)) for names in batches)
        compiled = (self._plan.model, *sizes) if self._adapter.is_compiled else None
        return StepPatience(self._group, self._hang_timeout_s, compiled)

    def _find_batches(self) -> list[list[str]]:
        """The members that share forward passes: as rows of one batch or, where a plan has several sizes, whose memory
        it has then, as one packed sequence."""
        batches: defaultdict[Hashable, list[str]] = defaultdict(list)
        for request_id, state in self._states.items():
            pack_key = self._adapter.pack_key(state) if self._is_mixed else None
            batches[pack_key or self._adapter.batch_key(state)].append(request_id)
        return list(batches.values())

    def _advance(self, members: Sequence[str]) -> None:
        """Do one step of members that share forward passes."""
        states = [self._states[request_id] for request_id in members]
        sketched = self._claim_previews(members)
        self._states.update(zip(members, self._adapter.advance(states), strict=True))
        for request_id, before in sketched.items():
            self._sketch(request_id, before, self._states[request_id])

    def _sketch(self, request_id: str, before: torch.Tensor, state: DenoisingState) -> None:
        try:
            sketch = self._adapter.sketch(before, state)
        except Exception:  # previews are an extra: whatever fails here must not end a plan
            logger.exception("there is no preview of %s after step %d", request_id, state.step)
            return
        self._control.on_preview(request_id, state.step, sketch)

    def _claim_previews(self, members: Sequence[str]) -> dict[str, torch.Tensor]:
        """The latents of those members of whose next step a preview is due. At all degrees the leader has all of
        them."""
        if not (self._is_leader and self._control.watched):
            return {}
        states = {request_id: self._states[request_id] for request_id in members}
        return {
            request_id: state.tensors["latents"]
            for request_id, state in states.items()
            if self._previews.claim(request_id, state.step + 1, state.num_steps)
        }

    def collect_outputs(self) -> dict[str, Parcel]:
        """The outputs by request, for its next plan: a denoising state, or latents when all its steps are done. A plan
        that was stopped has none."""
        if self.stopped:
            return {}
        if self._plan.stages[-1] is not Stage.DIFFUSE and self.paused_after is None:
            self._report_step()
        return {request_id: _pack_output(self._adapter, state) for request_id, state in self._states.items()}

    def count_skipped_steps(self) -> dict[str, float]:
        """The numbers of their steps so far that requests that need not be exact have skipped."""
        return {
            request_id: state.values[SKIPPED_STEPS]
            for request_id, state in self._states.items()
            if state.values[CACHE_LIMIT] > 0
        }

    def _report_step(self) -> None:
        """Report a step, if anybody wants to hear of it. The one after which the plan ends is left out: the plan's
        report says it, and would only wait behind the note."""
        if self._control.watched:
            for request_id, state in self._states.items():
                self._control.on_step(request_id, state.step)

    def _make_checkpoint(self, num_steps: int, before: Sequence[StageSpan], began_s: float) -> Checkpoint:
        """The checkpoint after `num_steps` steps of D, which began at `began_s` (Unix clock)."""
        parcels = {name: (state.step, _pack_state(state)) for name, state in self._states.items()}
        diffuse = StageSpan(Stage.DIFFUSE, began_s, time.time(), self._plan.workers, num_steps)
        return Checkpoint(num_steps, parcels, (*before, diffuse))

    def _make_starting_states(
        self, inputs: Mapping[str, GenerationInputs], given: Mapping[str, Parcel]
    ) -> dict[str, DenoisingState]:
        plan, adapter = self._plan, self._adapter
        states = {}
        for member in plan.members:
            if member.request_id not in inputs:
                continue
            parcel = _require_parcel(given.get(member.request_id), plan, member.request_id)
            content = inputs[member.request_id]
            state = _unpack_state(parcel) if is_state(parcel) else adapter.prepare(parcel.tensors, content)
            if member.steps is None or (state.step != member.steps[0] and not member.inherited):
                raise HandoffError(f"plan {plan.plan_id} starts at step {member.steps}, its state is at {state.step}")
            if state.num_steps != content.computed_steps:
                # Plans do the steps asked for: the outputs would be made of latents that are not done.
                raise InvalidRequestError(
                    f"this model's scheduler makes {state.num_steps} steps of {content.computed_steps}; ask for "
                    "another number",
                    "num_inference_steps",
                )
            states[member.request_id] = state
        return states


def _require_parcel(parcel: Parcel | None, plan: DispatchPlan, request_id: str) -> Parcel:
    if parcel is None:
        raise HandoffError(f"plan {plan.plan_id} of request {request_id} has no inputs")
    return parcel


def _pack_output(adapter: PipelineAdapter, state: DenoisingState) -> Parcel:
    return Parcel(adapter.latents(state)) if state.step == state.num_steps else _pack_state(state)


def _pack_state(state: DenoisingState) -> Parcel:
    return Parcel(state.tensors, {"step": state.step, "num_steps": state.num_steps, "values": state.values})


def is_state(parcel: Parcel) -> bool:
    """True of a denoising state with steps left, which is neither a condition nor final latents."""
    return "step" in parcel.values


def _unpack_state(parcel: Parcel) -> DenoisingState:
    values = parcel.values
    return DenoisingState(values["step"], values["num_steps"], dict(parcel.tensors), values["values"])


def _broadcast_states(
    states: dict[str, DenoisingState], group: SequenceGroup, is_leader: bool
) -> dict[str, DenoisingState]:
    """The leader's states on all workers of the group, in its order."""
    parcels = {request_id: _pack_state(state) for request_id, state in states.items()}
    values = group.broadcast_json([[request_id, parcel.values] for request_id, parcel in parcels.items()])
    for request_id, known in values:
        tensors = group.broadcast_tensors(parcels[request_id].tensors if is_leader else None)
        if not is_leader:
            states[request_id] = _unpack_state(Parcel(tensors, known))
    return states
