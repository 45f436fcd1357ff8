"""Runs the plans of one worker in the scheduler's order, and reports what comes of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from tridentserve.device import find_device
from tridentserve.device.memory_errors import describe_out_of_memory, is_out_of_memory
from tridentserve.engine.live.handoff.buffer import HandoffBuffer
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.messages import ExpectedPeak, PlanNote, PlanReport, PreviewNote
from tridentserve.engine.live.metrics import WorkerMetrics
from tridentserve.engine.live.previews.painter import PreviewFiles, PreviewPainter
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.replica_store import ReplicaStore, list_needed_replicas
from tridentserve.engine.live.worker.checkpoint_writer import Checkpoint, CheckpointWriter
from tridentserve.engine.live.worker.denoising import StepControl, is_state
from tridentserve.engine.live.worker.device_thread import DeviceThread
from tridentserve.engine.live.worker.executor import Execution, StageExecutor
from tridentserve.engine.live.worker.plan_memory import PlanMemory, RunningPlan
from tridentserve.engine.live.worker.reporting.plan_reports import PlanReporter
from tridentserve.engine.live.worker.reporting.step_teller import StepTeller
from tridentserve.errors import HandoffError, WorkerError
from tridentserve.plans import DispatchPlan, Replica, WorkerId
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

logger = logging.getLogger(__name__)

# The time for which the report of a plan waits for the next one to begin: some times what it takes where the weights of
# that one are in memory.
_HEAD_START_S = 0.01


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
        reporter: PlanReporter,
    ) -> None:
        """Who holds `order` has the worker to itself; plans wait for it in the order in which they came."""
        self._worker_id = worker_id
        self._device = find_device(device)
        self._device_thread = device_thread
        self._order = order
        self._executor = executor
        self._replicas = replicas
        self._memory = PlanMemory(replicas, host_copies)
        self._handoff = handoff
        self._painter = painter
        self._metrics = metrics
        self._reporter = reporter
        self._running: dict[int, RunningPlan] = {}  # given to this worker and not ended
        self._computing: RunningPlan | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by plan
        self._is_device_broken = False

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

        def write_checkpoint(checkpoint: Checkpoint) -> None:
            self._mark_made(parcel for _, parcel in checkpoint.states.values())
            loop.call_soon_threadsafe(writer.write_next, checkpoint)

        control.on_checkpoint = write_checkpoint
        needed = list_needed_replicas(plan, self._worker_id)
        running = RunningPlan(plan, inputs, control, expected, needed, tell, self._device.make_memory_peak())
        control.on_begin = lambda: loop.call_soon_threadsafe(running.begun.set)
        self._running[plan.plan_id] = running
        self._load_ahead()

        async def run() -> None:
            outcome = await self._run_in_turn(running)
            await self._painter.finish(plan.model, painting)
            teller.close()
            writer.drop_waiting()
            if before is not None:
                await asyncio.wait([before])  # the plan that is taken over is reported first
            report(outcome)

        before = self._tasks.get(plan.takes_over) if plan.takes_over is not None else None
        task = self._tasks[plan.plan_id] = loop.create_task(run())
        task.add_done_callback(lambda ended: self._tasks.pop(plan.plan_id))

    def find_control(self, plan_id: int) -> StepControl | None:
        """The control of a plan; None when it has ended."""
        running = self._running.get(plan_id)
        return running.control if running is not None else None

    def abort_groups(self, plan_id: int) -> None:
        """Give up the collectives of a plan, which has failed on another worker. The device thread may be waiting in
        one."""
        if (running := self._running.get(plan_id)) is not None and running.plan.groups:
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, self._executor.abort_groups_of_plan, running.plan)

    async def _run_in_turn(self, running: RunningPlan) -> PlanReport:
        plan = running.plan
        try:
            try:
                async with self._order:
                    execution = await self._execute_and_probe(running)
                    self._memory.end_peak(running)
                    if not execution.stopped:  # whose report has no effect
                        execution.loras = self._replicas.loras.take_news()
            finally:
                self._running.pop(plan.plan_id, None)  # its weights may leave while its outputs are made into files
                running.begun.set()
            await self._let_next_begin()
            return await self._reporter.make_report(running, execution)
        except Exception as error:  # whatever it is, the scheduler must hear that the plan has ended
            return self._reporter.make_failure(plan, error, self._is_device_broken)

    async def _let_next_begin(self) -> None:
        """Let the next plan begin, if all that it needs is here, before the outputs of one that has ended are made into
        files and it is reported. Both need the interpreter, and the device would wait for it."""
        after = next((other for other in self._running.values() if not other.is_skipped), None)
        if after is None or any(member.source not in (None, self._worker_id) for member in after.plan.members):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEAD_START_S):
                await after.begun.wait()

    async def _execute_and_probe(self, running: RunningPlan) -> Execution:
        """Execute a plan. After an error, look whether the device can still be used: this process is ended if not."""
        if self._is_device_broken:
            raise WorkerError(f"the device of {self._worker_id} is broken")
        try:
            return await self._execute(running)
        except Exception as error:
            self._is_device_broken = await self._device_thread(self._device.is_broken_by, error)
            raise

    async def _execute(self, running: RunningPlan) -> Execution:
        plan, control = running.plan, running.control
        if running.is_skipped:
            return Execution(stopped=True)
        try:
            # Weights and inputs come at the same time.
            incoming, frugal = await asyncio.gather(
                self._fetch_inputs(plan), self._memory.load(running, self._list_queued(running)), return_exceptions=True
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
        execution = await self._compute(running, incoming, frugal)
        self._hand_on(plan, execution)
        return execution

    async def _compute(self, running: RunningPlan, incoming: dict[str, Parcel], frugal: bool) -> Execution:
        """Run the plan in the device thread, while the weights of the next one come."""
        self._computing = running
        self._load_ahead()
        try:
            execution: Execution = await self._device_thread(
                self._execute_and_mark,
                running.plan,
                self._collect_inputs(running, incoming),
                incoming,
                running.control,
                frugal,
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            what = describe_out_of_memory(error)
        else:
            return execution
        finally:
            self._computing = None
        # Here, where the error keeps no tensors alive.
        await self._memory.make_room(running, self._list_queued(running))
        raise WorkerError(f"memory ran out on {self._worker_id}: {what}")

    def _load_ahead(self) -> None:
        """Begin to bring the weights of the plan after the one that computes."""
        if (running := self._computing) is not None:
            later = iter(self._running.values())
            waiting = (other for each in later if each is running for other in later)
            after = next((other for other in waiting if not other.is_skipped), None)
            if after is not None:
                self._memory.load_ahead(running, after)

    def _list_queued(self, running: RunningPlan) -> set[Replica]:
        """The replicas that other plans wait for."""
        others = (other for other in self._running.values() if other is not running)
        return {replica for other in others for replica in other.needed}

    def _execute_and_mark(self, *args: Any) -> Execution:
        """See `StageExecutor.execute_plan`; in the device thread."""
        execution = self._executor.execute_plan(*args)
        self._mark_made(execution.outputs.values())
        return execution

    def _mark_made(self, parcels: Iterable[Parcel]) -> None:
        """Copies of these parcels wait for the work so far, and for none that comes later."""
        mark = self._device.mark_work()
        for parcel in parcels:
            parcel.made = mark

    def _collect_inputs(self, running: RunningPlan, incoming: Mapping[str, Parcel]) -> dict[str, GenerationInputs]:
        """The content of the members. The leader leaves out those that have ended meanwhile, and those that have left
        the plan that is taken over, and the others follow."""
        plan, inputs = running.plan, running.inputs
        names = [name for name in plan.request_ids if name in inputs]
        if plan.leader == self._worker_id:
            absent = {member.request_id for member in plan.inherited} - incoming.keys()
            names = [name for name in names if name not in absent and not self._handoff.has_left(name, plan.plan_id)]
        return {name: inputs[name] for name in names}

    def _hand_on(self, plan: DispatchPlan, execution: Execution) -> None:
        """Keep the outputs, and push them to the workers that come next."""
        destinations = {member.request_id: member.push_to for member in plan.members}
        for request_id, parcel in execution.outputs.items():
            key = HandoffKey(request_id, plan.plan_id)
            self._handoff.keep_output(key, parcel)
            push_to = destinations[request_id]
            is_done = execution.paused_after is None
            # Those with steps left are not decoded yet.
            if is_done and push_to is not None and push_to != self._worker_id and not is_state(parcel):
                self._handoff.push_output(key, push_to)

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
                parcel = await self._handoff.fetch_parcel(key, member.source)
            except HandoffError:
                if member.inherited:
                    continue  # the plan that is taken over has decoded it, or has failed
                if len(plan.members) == 1 or not self._handoff.has_left(member.request_id, plan.plan_id):
                    raise
            else:
                if not member.inherited or is_state(parcel) is (Stage.DIFFUSE in plan.stages):
                    incoming[member.request_id] = parcel
        return incoming


def _wants_previews(running: RunningPlan) -> bool:
    """True when somebody watches a plan of which previews are wanted."""
    is_watched = running.control.watched and Stage.DIFFUSE in running.plan.stages
    return is_watched and any(inputs.wants_previews for inputs in running.inputs.values())
