"""Runs one plan on one worker, in the worker's device thread: the stages of the plan one after another.

The leader runs E and takes all decisions. At degrees above 1 the other workers get the denoising states from it, and
ask it before every step whether to continue, so that all workers stop at the same step boundary. The requests of a
batch share forward passes in E and D; they are decoded one after another, which bounds memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tridentserve.device import ComputeDevice
from tridentserve.device.memory_errors import is_out_of_memory
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.weights.replica_store import ReplicaStore
from tridentserve.engine.live.worker.decoding import Decoded, Decoding
from tridentserve.engine.live.worker.denoising import Denoising, StepControl
from tridentserve.errors import GroupError
from tridentserve.parallel import GroupCache, SequenceGroup
from tridentserve.pipelines.base import PipelineAdapter
from tridentserve.plans import DispatchPlan, Replica, StageSpan, WorkerId
from tridentserve.requests import GenerationInputs
from tridentserve.scheduling.estimation.hot_groups import HotGroup
from tridentserve.stages import Stage

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Execution:
    """The result of a plan on its leader; other workers have spans only."""

    spans: list[StageSpan] = field(default_factory=list)
    outputs: dict[str, Parcel] = field(default_factory=dict)
    """By request, for the next plan: a condition, a denoising state whose steps are not all done, or final latents."""
    decoded: Decoded = field(default_factory=dict)
    """By request, from DECODE."""
    stopped: bool = False
    """The plan was stopped on purpose and has no result."""
    paused_after: int | None = None
    """The plan was paused after this number of its own steps; `outputs` are the states at that step."""
    tiled: bool = False
    """C was done in tiles."""
    skipped_steps: dict[str, float] = field(default_factory=dict)
    """See `PlanReport.skipped_steps`."""
    taken_steps: dict[str, tuple[int, int]] = field(default_factory=dict)
    """See `PlanReport.taken_steps`."""
    loras: tuple[str, ...] | None = None
    """See `PlanReport.loras`."""


@dataclass(frozen=True, slots=True)
class _StageRun:
    """One stage of a plan on this worker."""

    plan: DispatchPlan
    stage: Stage
    group: SequenceGroup | None
    """The workers that run it together; None where this one is alone."""
    inputs: Mapping[str, GenerationInputs]
    execution: Execution
    """The result of the plan so far."""
    control: StepControl


class StageExecutor:
    """Executes plans for one worker. Not thread-safe: one plan at a time."""

    def __init__(
        self,
        worker_id: WorkerId,
        replicas: ReplicaStore,
        groups: GroupCache,
        device: ComputeDevice,
        hang_timeout_s: float | None = None,
    ) -> None:
        """`hang_timeout_s`: see `StepPatience`; None where only the timeout of the groups bounds their waits."""
        self._worker_id = worker_id
        self._replicas = replicas
        self._groups = groups
        self._device = device
        self._hang_timeout_s = hang_timeout_s

    def execute_plan(
        self,
        plan: DispatchPlan,
        inputs: Mapping[str, GenerationInputs],
        incoming: dict[str, Parcel],
        control: StepControl,
        frugal: bool = False,
    ) -> Execution:
        """Run all stages of a plan. On the leader, `inputs` has the members that have not ended, and `incoming` the
        outputs of their previous plans; on other workers `incoming` is empty. `frugal`: memory is short, so E is done
        one request after another, and C in tiles.

        After any error the other workers of the group do not wait for this one."""
        try:
            return self._execute(plan, inputs, incoming, control, frugal)
        except BaseException:
            self.abandon_groups(plan)
            raise

    def make_groups(self, groups: Sequence[HotGroup], number: int) -> None:
        """Make groups of the hot set, all of which this worker is in, before there are plans. One that cannot be made
        is tried again when a plan asks for it. `number`: of the making, from 1."""
        self._make_groups(self._groups.acquire, groups, number)

    def prepare_groups(self, groups: Sequence[HotGroup], number: int) -> None:
        """The same for those that are not there, in a thread beside that of the plans."""
        self._make_groups(self._groups.prepare, groups, number)

    def _make_groups(self, make: Callable[..., object], groups: Sequence[HotGroup], number: int) -> None:
        for group in groups:
            rank, size = group.workers.index(self._worker_id), len(group.workers)
            try:
                make(group.name, rank, size, -number, group.workers)  # as a use that no plan has
            except GroupError as error:
                logger.warning("the hot set lacks %s: %s", group.name, error)

    def abort_groups_of(self, worker_id: WorkerId) -> None:
        """Give up collectives with a worker whose process has ended; in any thread."""
        self._groups.abort_groups_of(worker_id)

    def abort_groups_of_plan(self, plan: DispatchPlan) -> None:
        """Give up the collectives of a plan that has failed elsewhere; in any thread."""
        for name in plan.groups.values():
            self._groups.abort_use(name, plan.plan_id)

    def drop_groups_of(self, worker_id: WorkerId) -> None:
        """Drop the groups of a worker whose process has ended."""
        self._groups.drop_groups_of(worker_id)

    def abandon_groups(self, plan: DispatchPlan) -> None:
        """Tell the other workers of a plan that this one will not run it, or not to its end."""
        rank = plan.workers.index(self._worker_id)
        for size, name in plan.groups.items():
            if rank < size:
                self._groups.abandon(name, rank, use=plan.plan_id)

    def _execute(
        self,
        plan: DispatchPlan,
        inputs: Mapping[str, GenerationInputs],
        incoming: dict[str, Parcel],
        control: StepControl,
        frugal: bool,
    ) -> Execution:
        execution = Execution(outputs=incoming)
        is_leader = plan.leader == self._worker_id
        groups = {size: self._get_group(plan, size) for size in plan.groups if self._worker_id in plan.workers[:size]}
        for stage in plan.stages:
            if self._worker_id not in plan.workers_of(stage):
                continue
            group = groups.get(len(plan.workers_of(stage)))
            run = _StageRun(plan, stage, group, inputs, execution, control)
            self._run_frugally_if_need_be(run, frugal)
            if execution.stopped:
                return Execution(execution.spans, stopped=True)
            if execution.paused_after is not None:
                break
        if not is_leader:
            return Execution(execution.spans)
        return Execution(execution.spans, stopped=True) if control.stopped and not execution.decoded else execution

    def _run_frugally_if_need_be(self, run: _StageRun, frugal: bool) -> None:
        """Run a stage. Where memory runs out in E or C, although it should not have, the stage is done again with less.
        In a group all members would have to, and D has no other form."""
        try:
            self._run_stage(run, frugal)
        except Exception as error:
            if frugal or run.group is not None or run.stage is Stage.DIFFUSE or not is_out_of_memory(error):
                raise
            logger.warning("%s of plan %d is done again frugally: %r", run.stage, run.plan.plan_id, error)
        else:
            return
        self._device.free_cached_memory()  # here, where the error keeps no tensors alive
        self._run_stage(run, frugal=True)

    def _run_stage(self, run: _StageRun, frugal: bool) -> None:
        plan, group = run.plan, run.group
        with self._replicas.use(Replica(plan.model, run.stage), group) as adapter:
            match run.stage:
                case Stage.ENCODE:
                    self._encode(run, adapter, frugal)
                case Stage.DIFFUSE:
                    try:
                        self._diffuse(run, Denoising(plan, adapter, group, run.control, self._hang_timeout_s))
                    finally:
                        adapter.end_steps()
                        self._replicas.loras.trim()
                case Stage.DECODE:
                    self._decode(run, Decoding(plan, adapter, group), frugal)

    def _encode(self, run: _StageRun, adapter: PipelineAdapter, frugal: bool) -> None:
        inputs, execution = run.inputs, run.execution
        due = [name for name in inputs if name not in execution.outputs]
        with self._time_stage(run):
            for names in [[name] for name in due] if frugal else [due]:
                conditions = adapter.encode_all([inputs[name] for name in names])
                execution.outputs |= {name: Parcel(each) for name, each in zip(names, conditions, strict=True)}

    def _diffuse(self, run: _StageRun, denoising: Denoising) -> None:
        execution = run.execution
        denoising.share_states(run.inputs, execution.outputs)
        if denoising.is_empty:
            execution.stopped = True
            return
        denoising.hold_loras()
        # The span begins here: the cost model learns seconds per step from it, without the waits for workers and files.
        with self._time_stage(run, denoising.num_steps):
            denoising.run_steps(execution.spans)
            execution.stopped, execution.paused_after = denoising.stopped, denoising.paused_after
        execution.outputs, execution.skipped_steps = denoising.collect_outputs(), denoising.count_skipped_steps()
        execution.taken_steps = denoising.list_taken_steps()

    def _decode(self, run: _StageRun, decoding: Decoding, frugal: bool) -> None:
        execution = run.execution
        with self._time_stage(run):
            decoded = decoding.decode_members(run.inputs, execution.outputs, run.control.stopped, in_tiles=frugal)
        # A plan that takes over another one may find that it has left nothing to decode.
        execution.stopped |= decoded is None or (run.plan.takes_over is not None and not run.inputs)
        execution.outputs, execution.decoded, execution.tiled = {}, decoded or {}, decoding.tiled

    @contextmanager
    def _time_stage(self, run: _StageRun, num_steps: int | None = None) -> Iterator[None]:
        """Add the span of a stage, from the end of the work before it to that of its own: a GPU computes later than it
        is asked to. Its length comes from a clock that is never set back. `num_steps`: of D, which may be paused."""
        self._device.wait_for_work()
        start_s, began_s = time.time(), time.perf_counter()
        if not run.execution.spans:
            run.control.on_begin()
        yield
        self._device.wait_for_work()
        if run.group is not None:
            run.group.confirm()
        end_s = start_s + time.perf_counter() - began_s
        plan, execution = run.plan, run.execution
        if num_steps is not None and execution.paused_after is not None:
            num_steps = execution.paused_after
        execution.spans.append(StageSpan(run.stage, start_s, end_s, plan.workers_of(run.stage), num_steps))

    def _get_group(self, plan: DispatchPlan, size: int) -> SequenceGroup:
        """The process group of the first `size` workers of a plan."""
        members = plan.workers[:size]
        rank = members.index(self._worker_id)
        return self._groups.acquire(plan.groups[size], rank, size, use=plan.plan_id, members=members)
