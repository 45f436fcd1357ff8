"""The outputs of stages: where they are, and when they reach the worker that needs them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tridentserve.engine.simulated.workers.actual_times import ActualTimes
from tridentserve.engine.simulated.workers.devices import Devices, PlanRun
from tridentserve.plans import PlanMember, WorkerId
from tridentserve.requests import RequestSpec
from tridentserve.stages import Stage

# A denoising state that is not at its end goes together with its condition.
_STATE = (Stage.ENCODE, Stage.DIFFUSE)


@dataclass(slots=True)
class _StageOutput:
    """The output of a request's last plan, or a checkpoint."""

    plan_id: int
    spec: RequestSpec
    stages: tuple[Stage, ...]
    """The stages whose outputs are in it."""
    holder: WorkerId
    """The worker that keeps it."""
    pushed_to: WorkerId | None = None
    """The worker to which it is pushed."""
    ready_s: float = 0.0
    """The time at which it arrives there."""
    buffered_bytes: int = 0
    """Bytes of the handoff buffer that it takes there."""
    spilled: bool = False
    """It waits in the holder's host memory, because the buffer was full."""
    steps_done: int | None = None
    """Denoising steps in a checkpoint, or a state that is not at its end; None for other outputs."""


class Handoff:
    """The outputs of all requests under way."""

    def __init__(self, devices: Devices, times: ActualTimes, capacity_bytes: int) -> None:
        self._devices = devices
        self._times = times
        self._capacity_bytes = capacity_bytes
        self._outputs: dict[str, _StageOutput] = {}
        self._checkpoints: dict[str, _StageOutput] = {}
        self._buffered: Counter[WorkerId] = Counter()
        self.transfers = 0
        self.transfer_bytes = 0
        self.spills = 0

    def list_missing(self, members: Iterable[PlanMember]) -> list[str]:
        """The requests whose inputs are not there (any more)."""
        return [
            member.request_id for member in members if member.input_id is not None and self._find_input(member) is None
        ]

    def _find_input(self, member: PlanMember) -> _StageOutput | None:
        """The output that a member begins with; None when it does not exist (any more)."""
        if not member.from_checkpoint:
            output = self._outputs.get(member.request_id)
            return output if output is not None and output.plan_id == member.input_id else None
        saved = self._checkpoints.get(member.request_id)
        if saved is None or member.steps is None:
            return None
        return saved if (saved.plan_id, saved.steps_done) == (member.input_id, member.steps[0]) else None

    def find_begun(self, member: PlanMember) -> int | None:
        """The denoising steps in the state that a member begins with; None where there is no such state."""
        output = self._find_input(member)
        return output.steps_done if output is not None else None

    def has_latents(self, member: PlanMember) -> bool:
        """True where a member begins with what all its denoising steps have made."""
        output = self._find_input(member)
        return output is not None and output.stages == (Stage.DIFFUSE,)

    def ready_s(self, run: PlanRun) -> float:
        """The time at which all that has been pushed to the leader of a plan is there; 0 when that is nothing."""
        ready_s = 0.0
        for member in run.plan.members:
            output = self._find_input(member)
            if member.input_id is not None and output is not None and output.pushed_to == run.plan.leader:
                ready_s = max(ready_s, output.ready_s)
        return ready_s

    def take(self, run: PlanRun) -> float:
        """The plan's leader takes its inputs. Returns the seconds it needs to fetch those not pushed to it."""
        leader = run.plan.leader
        seconds = 0.0
        for member in run.plan.members:
            output = self._find_input(member)
            if member.input_id is None or output is None:
                continue
            if leader not in (output.holder, output.pushed_to):
                seconds += self._move(output, leader)
            if member.from_checkpoint:
                continue  # it stays where it is, because this plan may be lost too
            self._unbuffer(output)
            output.holder, output.pushed_to, output.spilled = leader, None, False
        return seconds

    def keep(self, run: PlanRun, now_s: float) -> None:
        """A plan has ended after its last stage or step. Its outputs replace those kept of its requests and are
        pushed to the leader of the next plan."""
        last = run.spans[-1].stage
        pushed: defaultdict[WorkerId, list[_StageOutput]] = defaultdict(list)
        for member, spec in zip(run.plan.members, run.specs, strict=True):
            if last is Stage.DECODE:
                self.drop_outputs(spec.request_id)
                continue
            stages: tuple[Stage, ...] = (last,)
            if last is Stage.DIFFUSE and member.steps is not None:
                is_done = member.steps[0] + run.steps_done == spec.num_inference_steps
                stages = (last,) if is_done else _STATE
            self.drop_outputs(spec.request_id)
            output = _StageOutput(run.plan.plan_id, spec, stages, run.plan.leader)
            if stages == _STATE and member.steps is not None:
                output.steps_done = member.steps[0] + run.steps_done
            self._outputs[spec.request_id] = output
            target = member.push_to
            if run.num_steps is None and stages == (last,) and target is not None and target != run.plan.leader:
                pushed[target].append(output)
        for target, outputs in pushed.items():
            if self._devices[target].alive:
                self._push(outputs, target, now_s)

    def save(self, plan_id: int, spec: RequestSpec, keeper: WorkerId, steps_done: int) -> None:
        """A checkpoint of a request has arrived. It replaces the one before."""
        self._checkpoints[spec.request_id] = _StageOutput(plan_id, spec, _STATE, keeper, steps_done=steps_done)

    def checkpoint_seconds(self, run: PlanRun, to: WorkerId) -> float:
        """Seconds until checkpoints of a running plan are on another worker."""
        return sum(self._move(_StageOutput(run.plan.plan_id, spec, _STATE, run.plan.leader), to) for spec in run.specs)

    @property
    def kept(self) -> int:
        """Number of outputs and checkpoints that are kept; 0 when no request is under way."""
        return len(self._outputs) + len(self._checkpoints)

    def drop(self, request_id: str) -> None:
        """Drop the output and the checkpoint of a request."""
        self.drop_outputs(request_id)
        self._checkpoints.pop(request_id, None)

    def drop_outputs(self, request_id: str) -> None:
        """Drop the output of a request, but not its checkpoint."""
        output = self._outputs.pop(request_id, None)
        if output is not None:
            self._unbuffer(output)

    def lose(self, worker_id: WorkerId, now_s: float) -> None:
        """A worker has lost all outputs and checkpoints. Outputs that were pushed to it are still at their holders."""
        for request_id, output in list(self._outputs.items()):
            if output.pushed_to == worker_id:
                self._unbuffer(output)
                output.pushed_to = None
            elif output.holder == worker_id and output.pushed_to is not None and output.ready_s <= now_s:
                output.holder = output.pushed_to
            if output.holder == worker_id:
                self.drop_outputs(request_id)
        for request_id in [name for name, copy in self._checkpoints.items() if copy.holder == worker_id]:
            del self._checkpoints[request_id]

    def _push(self, outputs: list[_StageOutput], target: WorkerId, now_s: float) -> None:
        """Push outputs in one transfer, while the workers compute. Those that do not fit wait in host memory."""
        batch = 0
        fitting = []
        for output in outputs:
            num_bytes = self._count_bytes(output)
            if self._buffered[target] + num_bytes > self._capacity_bytes:
                output.spilled = True
                self.spills += 1
                continue
            self._buffered[target] += num_bytes
            output.buffered_bytes = num_bytes
            output.pushed_to = target
            batch += output.spec.num_outputs
            fitting.append(output)
        if not fitting:
            return
        first = fitting[0]
        seconds = self._times.transfer_seconds(
            first.spec.model, first.stages[0], first.spec.shape, batch, self._is_same_node(first.holder, target)
        )
        for output in fitting:
            output.ready_s = now_s + seconds
            self._count_transfer(output.buffered_bytes)

    def _move(self, output: _StageOutput, to: WorkerId) -> float:
        """Seconds to fetch an output from where it is."""
        spec = output.spec
        where = output.holder
        same_node = self._is_same_node(where, to)
        seconds = 0.0
        for stage in output.stages:
            num_bytes = self._times.output_bytes(spec.model, stage, spec.shape, spec.num_outputs)
            seconds += self._times.transfer_seconds(spec.model, stage, spec.shape, spec.num_outputs, same_node)
            if output.spilled:
                seconds += self._times.host_seconds(spec.model, stage, num_bytes)
        self._count_transfer(self._count_bytes(output))
        return seconds

    def _count_bytes(self, output: _StageOutput) -> int:
        spec = output.spec
        return sum(self._times.output_bytes(spec.model, stage, spec.shape, spec.num_outputs) for stage in output.stages)

    def _count_transfer(self, num_bytes: int) -> None:
        self.transfers += 1
        self.transfer_bytes += num_bytes

    def _is_same_node(self, one: WorkerId, other: WorkerId) -> bool:
        return self._devices[one].spec.node_id == self._devices[other].spec.node_id

    def _unbuffer(self, output: _StageOutput) -> None:
        if output.buffered_bytes and output.pushed_to is not None:
            self._buffered[output.pushed_to] -= output.buffered_bytes
            output.buffered_bytes = 0
