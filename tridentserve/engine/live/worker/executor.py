"""Runs one plan on one worker, in the worker's device thread: the stages of the plan one after another.

The leader runs E and takes all decisions. At degrees above 1 the other workers get the denoising states from it, and
ask it before every step whether to continue, so that all workers stop at the same step boundary. The requests of a
batch share forward passes in E and D; they are decoded one after another, which bounds memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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

# The number of a group's use that comes before the number of any plan.
_BEFORE_ALL_PLANS = -1


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


class StageExecutor:
    """Executes plans for one worker. Not thread-safe: one plan at a time."""

    def __init__(self, worker_id: WorkerId, replicas: ReplicaStore, groups: GroupCache) -> None:
        self._worker_id = worker_id
        self._replicas = replicas
        self._groups = groups

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

    def make_groups(self, groups: Sequence[HotGroup]) -> None:
        """Make the groups of the hot set that this worker is in. One that cannot be made is tried again when a plan
        asks for it."""
        for group in groups:
            if self._worker_id in group.workers:
                rank, size = group.workers.index(self._worker_id), len(group.workers)
                try:
                    made = self._groups.acquire(group.name, rank, size, use=_BEFORE_ALL_PLANS, members=group.workers)
                    made.agree()  # NCCL connects at the first collective
                except GroupError as error:
                    logger.warning("the hot set lacks %s: %s", group.name, error)

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
            with self._replicas.use(Replica(plan.model, stage), group) as adapter:
                match stage:
                    case Stage.ENCODE:
                        self._encode(plan, adapter, inputs, execution, frugal)
                    case Stage.DIFFUSE:
                        try:
                            _run_diffuse(plan, Denoising(plan, adapter, group, control), inputs, execution)
                        finally:
                            adapter.drop_lora()
                    case Stage.DECODE:
                        _run_decode(plan, Decoding(plan, adapter, group), inputs, execution, control, frugal)
            if execution.stopped:
                return Execution(execution.spans, stopped=True)
            if execution.paused_after is not None:
                break
        if not is_leader:
            return Execution(execution.spans)
        return Execution(execution.spans, stopped=True) if control.stopped and not execution.decoded else execution

    @staticmethod
    def _encode(
        plan: DispatchPlan,
        adapter: PipelineAdapter,
        inputs: Mapping[str, GenerationInputs],
        execution: Execution,
        frugal: bool,
    ) -> None:
        due = [name for name in inputs if name not in execution.outputs]
        with _time_stage(Stage.ENCODE, plan, execution):
            for names in [[name] for name in due] if frugal else [due]:
                conditions = adapter.encode_all([inputs[name] for name in names])
                execution.outputs |= {name: Parcel(each) for name, each in zip(names, conditions, strict=True)}

    def _get_group(self, plan: DispatchPlan, size: int) -> SequenceGroup:
        """The process group of the first `size` workers of a plan."""
        members = plan.workers[:size]
        rank = members.index(self._worker_id)
        return self._groups.acquire(plan.groups[size], rank, size, use=plan.plan_id, members=members)


def _run_diffuse(
    plan: DispatchPlan, denoising: Denoising, inputs: Mapping[str, GenerationInputs], execution: Execution
) -> None:
    denoising.share_states(inputs, execution.outputs)
    # The span begins here: the cost model learns seconds per step from it, without the wait for other workers.
    with _time_stage(Stage.DIFFUSE, plan, execution):
        denoising.run_steps(execution.spans)
        execution.stopped, execution.paused_after = denoising.stopped, denoising.paused_after
    execution.outputs, execution.skipped_steps = denoising.collect_outputs(), denoising.count_skipped_steps()


def _run_decode(
    plan: DispatchPlan,
    decoding: Decoding,
    inputs: Mapping[str, GenerationInputs],
    execution: Execution,
    control: StepControl,
    frugal: bool,
) -> None:
    with _time_stage(Stage.DECODE, plan, execution):
        decoded = decoding.decode_members(inputs, execution.outputs, control.stopped, in_tiles=frugal)
    execution.stopped |= decoded is None
    execution.outputs, execution.decoded, execution.tiled = {}, decoded or {}, decoding.tiled


@contextmanager
def _time_stage(stage: Stage, plan: DispatchPlan, execution: Execution) -> Iterator[None]:
    """Add the span of a stage. Its length comes from a clock that is never set back."""
    start_s, began_s = time.time(), time.perf_counter()
    yield
    end_s = start_s + time.perf_counter() - began_s
    steps = plan.num_steps if execution.paused_after is None else execution.paused_after
    execution.spans.append(
        StageSpan(stage, start_s, end_s, plan.workers_of(stage), steps if stage is Stage.DIFFUSE else None)
    )
