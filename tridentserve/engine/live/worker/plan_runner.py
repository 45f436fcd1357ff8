"""Runs the plans of one worker in the scheduler's order, and reports what comes of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from tridentserve.engine.live.handoff.buffer import HandoffBuffer
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.messages import ExpectedPeak, PlanNote, PlanReport, PreviewNote
from tridentserve.engine.live.metrics import WorkerMetrics
from tridentserve.engine.live.previews.painter import PreviewFiles, PreviewPainter
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.replica_store import ReplicaStore, list_needed_replicas
from tridentserve.engine.live.worker.checkpoint_writer import CheckpointWriter
from tridentserve.engine.live.worker.denoising import StepControl
from tridentserve.engine.live.worker.device_thread import DeviceThread
from tridentserve.engine.live.worker.executor import Execution, StageExecutor
from tridentserve.engine.live.worker.memory_peak import MemoryPeak
from tridentserve.engine.live.worker.output_files import EncodedOutput, encode_outputs
from tridentserve.engine.live.worker.step_teller import StepTeller
from tridentserve.errors import HandoffError, OutOfMemoryError, TridentServeError, WorkerError
from tridentserve.models.lora_files import lora_bytes
from tridentserve.models.step_cache import count_cache_bytes
from tridentserve.plans import DispatchPlan, Replica, WorkerId
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

logger = logging.getLogger(__name__)

# Up to this number of bytes, the outputs of a plan go with its report: Ray, too, sends results of this size themselves
# and not a reference to them. A reference costs both ends more than a millisecond.
MAX_INLINE_BYTES = 100 * 1024


@dataclass(frozen=True, slots=True)
class RunningPlan:
    """A plan that a worker has been given, with all that it needs to run it."""

    plan: DispatchPlan
    inputs: Mapping[str, GenerationInputs]
    """Content of each member's request, by request id."""
    control: StepControl
    expected: ExpectedPeak
    """Memory that its activations are expected to take on this worker."""
    needed: tuple[Replica, ...]
    """Replicas that it uses on this worker."""
    tell: Callable[[PlanNote], None]
    """Takes the notes of the plan, in the event loop."""
    peak: MemoryPeak


class PlanRunner:
    """Plans wait for their weights and inputs in the event loop and run in the device thread, one at a time."""

    def __init__(
        self,
        worker_id: WorkerId,
        device: torch.device,
        device_thread: DeviceThread,
        order: asyncio.Lock,
        executor: StageExecutor,
        replicas: ReplicaStore,
        host_copies: HostCopies,
        handoff: HandoffBuffer,
        painter: PreviewPainter,
        metrics: WorkerMetrics,
    ) -> None:
        """Who holds `order` has the worker to itself; plans wait for it in the order in which they came."""
        self._worker_id = worker_id
        self._device = device
        self._device_thread = device_thread
        self._order = order
        self._executor = executor
        self._replicas = replicas
        self._host_copies = host_copies
        self._handoff = handoff
        self._painter = painter
        self._metrics = metrics
        self._running: dict[int, RunningPlan] = {}  # given to this worker and not ended
        self._kept: dict[int, list[EncodedOutput]] = {}  # outputs that nobody has collected yet, by plan
        self._tasks: set[asyncio.Task[None]] = set()

    def start_plan(
        self,
        plan: DispatchPlan,
        inputs: Mapping[str, GenerationInputs],
        expected: ExpectedPeak,
        is_watched: bool,
        tell: Callable[[PlanNote], None],
        report: Callable[[PlanReport], None],
    ) -> None:
        """Run a plan behind those started before. One that cannot fit, however frugally it is run, is refused.

        `tell` is called with each replica that was loaded for it; on the leader with the steps (`StepTeller`) of a plan
        that is watched, with the previews that its requests want, and with each state checkpoint that has arrived; then
        `report` once, for whatever outcome."""
        loop = asyncio.get_running_loop()
        control = StepControl()
        if is_watched:
            control.ask_to_tell()
        teller, painting = StepTeller(tell), list[Future[None]]()

        def paint(request_id: str, step: int, sketch: torch.Tensor) -> None:
            def tell_files(files: PreviewFiles) -> None:
                loop.call_soon_threadsafe(tell, PreviewNote(request_id, step, files))

            painting.append(self._painter.paint(plan.model, sketch, inputs[request_id], tell_files))

        if plan.leader == self._worker_id:
            control.on_step, control.on_preview = teller.note_step, paint
        writer = CheckpointWriter(plan, self._handoff, tell, self._metrics.count_checkpoint)
        control.on_checkpoint = lambda checkpoint: loop.call_soon_threadsafe(writer.write_next, checkpoint)
        needed = list_needed_replicas(plan, self._worker_id)
        running = RunningPlan(plan, inputs, control, expected, needed, tell, MemoryPeak(self._device))
        self._running[plan.plan_id] = running

        async def run() -> None:
            outcome = await self._run_in_turn(running)
            await self._painter.finish(plan.model, painting)
            teller.close()
            writer.drop_waiting()
            report(outcome)

        task = loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def find_control(self, plan_id: int) -> StepControl | None:
        """The control of a plan; None when it has ended."""
        running = self._running.get(plan_id)
        return running.control if running is not None else None

    def take_outputs(self, plan_id: int) -> list[EncodedOutput]:
        """The outputs that did not go with the report of a plan, request by request. Nobody gets them again."""
        return self._kept.pop(plan_id)

    async def _run_in_turn(self, running: RunningPlan) -> PlanReport:
        plan = running.plan
        try:
            async with self._order:
                execution = await self._execute(running)
                running.peak.end()
            return await self._make_report(running, execution)
        except Exception as error:  # whatever it is, the scheduler must hear that the plan has ended
            return self._make_failure(plan, error)
        finally:
            self._running.pop(plan.plan_id, None)

    async def _execute(self, running: RunningPlan) -> Execution:
        plan, control = running.plan, running.control
        if control.stopped and plan.degree == 1:
            return Execution(stopped=True)
        try:
            # Weights and inputs come at the same time.
            incoming, frugal = await asyncio.gather(
                self._fetch_inputs(plan), self._load_replicas(running), return_exceptions=True
            )
            if isinstance(incoming, BaseException):
                raise incoming
            if isinstance(frugal, BaseException):
                raise frugal
        except BaseException as error:
            if control.stopped and plan.degree == 1 and isinstance(error, HandoffError):
                return Execution(stopped=True)  # its request has ended, so that its inputs were dropped
            await self._device_thread(self._executor.abandon_groups, plan)
            raise
        if plan.leader == self._worker_id and _wants_previews(running):
            await self._device_thread(self._painter.prepare, plan.model)
        running.peak.begin()
        execution = await self._device_thread(
            self._executor.execute_plan, plan, self._collect_inputs(running), incoming, control, frugal
        )
        self._hand_on(plan, execution)
        return execution

    def _collect_inputs(self, running: RunningPlan) -> dict[str, GenerationInputs]:
        """The content of the members. The leader leaves out those that have ended meanwhile, and the others follow."""
        plan, inputs = running.plan, running.inputs
        is_leader = plan.leader == self._worker_id
        return {
            name: inputs[name]
            for name in plan.request_ids
            if name in inputs and not (is_leader and self._handoff.has_left(name, plan.plan_id))
        }

    def _hand_on(self, plan: DispatchPlan, execution: Execution) -> None:
        """Keep the outputs, and push them to the workers that come next."""
        destinations = {member.request_id: member.push_to for member in plan.members}
        for request_id, parcel in execution.outputs.items():
            key = HandoffKey(request_id, plan.plan_id)
            self._handoff.keep_output(key, parcel)
            push_to = destinations[request_id]
            is_done = execution.paused_after is None
            if is_done and push_to is not None and push_to != self._worker_id:
                self._handoff.push_output(key, push_to)

    async def _load_replicas(self, running: RunningPlan) -> bool:
        """Have in memory what the plan runs here. Returns whether it must be run frugally to fit."""
        others = (other for other in self._running.values() if other is not running)
        queued = {replica for other in others for replica in other.needed}
        expected, tell = running.expected.with_bytes(self._count_own_bytes(running)), running.tell
        keep = self._replicas.wanted if running.plan.is_warm_up else ()  # for which none of the placement leaves
        try:
            await self._replicas.prepare(running.needed, expected.num_bytes, queued, keep, tell)
        except OutOfMemoryError:
            if expected.frugal_bytes >= expected.num_bytes:
                raise
            await self._replicas.prepare(running.needed, expected.frugal_bytes, queued, keep, tell)
            return True
        return False

    def _count_own_bytes(self, running: RunningPlan) -> int:
        """Bytes that D needs for LoRAs and step caches, which no profile knows of."""
        if Stage.DIFFUSE not in running.plan.stages:
            return 0
        replica, requests = Replica(running.plan.model, Stage.DIFFUSE), running.inputs.values()
        folder, formats = self._host_copies.source(replica).folder, self._host_copies.formats(replica)
        loras = lora_bytes(folder, (inputs.lora for inputs in requests))
        return loras + count_cache_bytes(folder, requests, formats)

    async def _fetch_inputs(self, plan: DispatchPlan) -> dict[str, Parcel]:
        """Fetch the outputs of each member's previous plan, on the leader only. A member of a batch that has ended
        meanwhile needs none."""
        incoming: dict[str, Parcel] = {}
        if plan.leader != self._worker_id:
            return incoming
        for member in plan.members:
            if member.input_id is None or member.source is None:
                continue
            try:
                step = member.steps[0] if member.from_checkpoint and member.steps is not None else None
                key = HandoffKey(member.request_id, member.input_id, step)
                incoming[member.request_id] = await self._handoff.fetch_parcel(key, member.source)
            except HandoffError:
                if len(plan.members) == 1 or not self._handoff.has_left(member.request_id, plan.plan_id):
                    raise
        return incoming

    async def _make_report(self, running: RunningPlan, execution: Execution) -> PlanReport:
        plan, peak = running.plan, running.peak
        images = {} if plan.is_warm_up else execution.images
        made = {
            request_id: await asyncio.to_thread(encode_outputs, pixels, running.inputs[request_id])
            for request_id, pixels in images.items()
        }
        inline = _choose_inline(made)
        if inline is None:
            self._kept[plan.plan_id] = [output for outputs in made.values() for output in outputs]
        if not plan.is_warm_up:
            self._count_plan(running, execution)
        return PlanReport(
            plan_id=plan.plan_id,
            outcome="stopped" if execution.stopped else "finished",
            paused_after=execution.paused_after,
            spans=execution.spans,
            num_outputs={request_id: len(outputs) for request_id, outputs in made.items()},
            outputs=inline,
            peak_memory_bytes=peak.total_bytes,
            peak_growth_bytes=peak.growth_bytes,
            expected_peak_bytes=running.expected.num_bytes,
            tiled=execution.tiled,
            skipped_steps=execution.skipped_steps,
            buffer_used_bytes=self._handoff.used_bytes,
            buffer_bytes=self._handoff.capacity_bytes,
        )

    def _count_plan(self, running: RunningPlan, execution: Execution) -> None:
        plan = running.plan
        self._metrics.count_stages(plan, execution.spans)
        if not execution.stopped:
            self._metrics.set_plan_peak(plan, running.peak.growth_bytes, running.expected.num_bytes)
            self._metrics.count_tiled_decodes(plan, len(execution.images) if execution.tiled else 0)

    def _make_failure(self, plan: DispatchPlan, error: Exception) -> PlanReport:
        names = ", ".join(plan.request_ids)
        if isinstance(error, TridentServeError):
            logger.warning("plan %d of %s failed: %s", plan.plan_id, names, error)
            message, code, retry = str(error), error.code, _may_succeed_later(error)
        else:
            logger.warning("plan %d of %s failed: %s", plan.plan_id, names, error, exc_info=error)
            # The text of an error of a library may quote the prompt: it stays in this worker's log.
            message = f"{type(error).__name__} (more in the log of {self._worker_id})"
            code, retry = WorkerError.code, True
        return PlanReport(plan.plan_id, "failed", error=message, retry=retry, code=code)


def _wants_previews(running: RunningPlan) -> bool:
    """True when somebody watches a plan of which previews are wanted."""
    is_watched = running.control.watched and Stage.DIFFUSE in running.plan.stages
    return is_watched and any(inputs.wants_previews for inputs in running.inputs.values())


def _may_succeed_later(error: TridentServeError) -> bool:
    """True when the plan's requests may succeed another time. A plan that does not fit into empty
    memory never will, and a fault of a request stays."""
    return error.http_status >= 500 and not isinstance(error, OutOfMemoryError)


def _choose_inline(made: Mapping[str, Sequence[EncodedOutput]]) -> dict[str, tuple[bytes, ...]] | None:
    """The outputs, where all of them together are small files; None where they are not."""
    files = {
        request_id: tuple(output for output in outputs if isinstance(output, bytes))
        for request_id, outputs in made.items()
    }
    is_whole = all(len(files[request_id]) == len(outputs) for request_id, outputs in made.items())
    num_bytes = sum(len(file) for each in files.values() for file in each)
    return files if is_whole and num_bytes <= MAX_INLINE_BYTES else None
