"""The StageWorker: one Ray actor per device. It runs plans in the scheduler's order and moves tensors to its peers.

Device work happens in one thread; the event loop stays free for pings, cancels and pushes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from tridentserve.engine.live.handoff.buffer import HandoffBuffer
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.handoff.ray_peer import RayPeer
from tridentserve.engine.live.messages import (
    UNKNOWN_PEAK,
    ExpectedPeak,
    LinkAddress,
    ModelSource,
    PlanReport,
    ReplicaLoad,
    StatesSaved,
    StepNote,
    WorkerConfig,
    WorkerReady,
)
from tridentserve.engine.live.metrics import GAUGE_PERIOD_S, WorkerMetrics
from tridentserve.engine.live.transport.nixl_link import NixlLink
from tridentserve.engine.live.transport.parcel import Layout, Parcel
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.peer_weights import PeerWeights, WeightOrder
from tridentserve.engine.live.weights.replica_store import MemoryBudget, ReplicaStore, replicas_needed
from tridentserve.engine.live.worker.checkpoint_writer import StateSaver
from tridentserve.engine.live.worker.executor import Execution, StageExecutor, StepControl
from tridentserve.engine.live.worker.memory_peak import PlanPeak
from tridentserve.engine.live.worker.output_files import Output, encoded_outputs
from tridentserve.engine.live.worker.turns import Turns
from tridentserve.errors import HandoffError, OutOfMemoryError, TridentServeError
from tridentserve.models.lora_files import lora_bytes
from tridentserve.parallel import GroupCache, connect_store
from tridentserve.plans import DispatchPlan, Replica, WorkerId
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

logger = logging.getLogger(__name__)

T = TypeVar("T")
# The content of each member of a plan.
Inputs = dict[str, GenerationInputs]
# What a plan's call yields before its report; None ends it.
Note = StepNote | StatesSaved | ReplicaLoad
Notes = asyncio.Queue[Note | None]


@dataclass(frozen=True, slots=True)
class _Given:
    """A plan with all that comes with it. `expected`: of its activations; `tell` hears of its loads."""

    plan: DispatchPlan
    inputs: Inputs
    control: StepControl
    expected: ExpectedPeak
    tell: Callable[[ReplicaLoad], None]
    peak: PlanPeak


class StageWorker:
    """Holds Encode, Diffuse and Decode replicas as its placement says, on one device."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        options = config.options
        torch.set_num_threads(options.num_threads)
        self._device = torch.device(options.torch_device)
        self._device_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self._turns = Turns()
        self._controls: dict[int, StepControl] = {}
        # Plans told to stop or to pause before their call came in (or after they ended, hence the bound).
        self._stopped_early: deque[int] = deque(maxlen=1024)
        self._paused_early: deque[int] = deque(maxlen=1024)
        self._metrics = WorkerMetrics(config.spec.worker_id)
        store = connect_store(config.store_host, config.store_port)
        groups = GroupCache(store, self._device, capacity=options.max_groups, timeout_s=options.group_timeout_s)
        slab = torch.zeros(options.handoff_bytes, dtype=torch.uint8, device=self._device)
        self._link = _start_link(config, slab)
        self._peers: dict[WorkerId, RayPeer] = {}
        self._host_copies = HostCopies(options.host_dir, config.sources, self._device)
        self._replicas = self._replica_store()
        self._executor = StageExecutor(config.spec.worker_id, self._replicas, groups)
        # What plans need that have been given and have not ended.
        self._needed: dict[int, tuple[Replica, ...]] = {}
        self._handoff = HandoffBuffer(config.spec.worker_id, self._peers, slab, self._link, self._metrics.handoff_done)

    def _replica_store(self) -> ReplicaStore:
        options, peers = self._config.options, None
        if self._link is not None:
            peers = PeerWeights(self._link, self._peers, _node_id(), options.block_bytes)
        budget = MemoryBudget(self._config.spec.memory_bytes, options.handoff_bytes, options.group_bytes)
        return ReplicaStore(
            self._host_copies,
            self._device,
            budget,
            options.fetch,
            options.block_bytes,
            self._on_device,
            peers,
            self._metrics.replica_loaded,
        )

    def __repr__(self) -> str:
        return f"StageWorker({self._config.spec.worker_id}, {self._config.label})"

    async def start(self) -> WorkerReady:
        """Make the node's host copies, with its other workers, and load the replicas of the placement."""
        everything = [Replica(model, stage) for model in self._config.sources for stage in Stage]
        await self._on_device(self._host_copies.make_all, everything)
        await self._replicas.start(frozenset(one for one in self._config.replicas if one.model in self._config.sources))
        self._reporter = asyncio.get_running_loop().create_task(self._report_levels())
        address = self._link.address if self._link is not None else None
        return WorkerReady(address, _node_id())

    async def place(self, replicas: frozenset[Replica], label: str) -> None:
        """Another placement is in force. Weights move when plans need them."""
        self._replicas.wanted = replicas
        self._config = replace(self._config, replicas=replicas, label=label)

    async def learn(self, source: ModelSource) -> None:
        """There is another model; its host copies have been made."""
        self._host_copies.learn(source)

    async def unload(self, number: int, model: str) -> None:
        """Drop all that is kept of a model, in turn (see `run`): nothing of it runs or waits here any more."""
        async with self._turns.turn(number):
            await self._replicas.unload(model)
            await self._on_device(self._host_copies.drop, model)

    async def connect(self, peers: dict[WorkerId, tuple[ray.actor.ActorHandle[Any], WorkerReady]]) -> None:
        """Get to know peers; a peer that came back replaces its former self."""
        for worker_id, (handle, ready) in peers.items():
            if worker_id == self._config.spec.worker_id:
                continue
            former = self._peers.get(worker_id)
            if former is not None:
                self._handoff.lose_peer(worker_id)
                self._device_thread.submit(self._executor.lose_member, worker_id)
                if self._link is not None and former.link_name is not None:
                    self._link.remove_peer(former.link_name)
            self._peers[worker_id] = RayPeer(handle, await self._link_to(ready.address), ready.node_id)

    async def make_groups(self) -> None:
        """Make the hot set, together with the others."""
        await self._on_device(self._executor.make_groups, self._config.hot_groups)

    async def _link_to(self, address: LinkAddress | None) -> str | None:
        """The name under which NIXL knows a peer from now on; None where host memory has to do."""
        if self._link is None or address is None:
            return None
        try:
            await asyncio.wrap_future(self._link.add_peer(address))
        except Exception as error:  # NIXL raises classes of its own
            logger.warning("NIXL does not take peer %s, its handoffs go through host memory: %s", address.name, error)
            return None
        return address.name

    async def _report_levels(self) -> None:
        while True:
            self._metrics.handoff_level(self._handoff)
            self._metrics.replica_level(self._replicas.resident_bytes)
            await asyncio.sleep(GAUGE_PERIOD_S)

    async def watch(self) -> None:
        """Never returns: whoever waits for it hears at once when this process ends."""
        await asyncio.Event().wait()

    async def ping(self) -> int:
        """Parcels kept by the handoff buffer: 0 when no request is under way."""
        return self._handoff.num_parcels

    # Plans.

    async def run(
        self, number: int, plan: DispatchPlan, inputs: Inputs, expected: ExpectedPeak = UNKNOWN_PEAK
    ) -> AsyncIterator[Note | PlanReport | Output]:
        """Run a plan when its turn (`number`, from 0 without gaps) comes. `expected`: what its activations take here; a
        plan that cannot fit, however frugally it is run, is refused.

        Yields each replica that was loaded for it, then on the leader a note per request and denoising step (but
        for the one after which the plan ends) and one for each copy of the states, then one report, then the outputs,
        request by request."""
        notes: Notes = asyncio.Queue()
        loop = asyncio.get_running_loop()
        control = StepControl()
        if plan.leader == self._config.spec.worker_id:
            control.on_step = lambda request_id, done: _post(loop, notes, StepNote(request_id, done))
        saver = StateSaver(plan, self._handoff, notes.put_nowait, self._metrics.state_saved)
        control.on_snapshot = lambda snapshot: loop.call_soon_threadsafe(saver.offer, snapshot)
        self._controls[plan.plan_id] = control
        self._needed[plan.plan_id] = replicas_needed(plan, self._config.spec.worker_id)
        if plan.plan_id in self._stopped_early:
            control.stop()
        if plan.plan_id in self._paused_early:
            control.pause()
        given = _Given(plan, inputs, control, expected, notes.put_nowait, PlanPeak(self._device))
        task = loop.create_task(self._run_in_turn(number, given))
        task.add_done_callback(lambda _: notes.put_nowait(None))
        while (note := await notes.get()) is not None:
            yield note
        saver.close()
        report, pictures = await task
        yield report
        for picture in pictures:
            yield picture

    async def stop(self, plan_id: int) -> None:
        """Stop a plan at its next step boundary, or before it starts."""
        control = self._controls.get(plan_id)
        if control is not None:
            control.stop()
        else:
            self._stopped_early.append(plan_id)

    async def pause(self, plan_id: int) -> None:
        """Pause a plan at its next step boundary; its report says how far it came. D that has ended is not held up."""
        control = self._controls.get(plan_id)
        if control is not None:
            control.pause()
        else:
            self._paused_early.append(plan_id)

    async def forget(self, request_id: str, last_plan_id: int, copies: bool = True) -> None:
        """Drop what is kept of a request that has ended or starts again, with the copies of its state unless it goes on
        from one of them."""
        self._handoff.forget(request_id, last_plan_id, copies)

    async def _run_in_turn(self, number: int, given: _Given) -> tuple[PlanReport, list[Output]]:
        plan = given.plan
        try:
            async with self._turns.turn(number):
                execution = await self._execute(given)
                given.peak.end()
            return await self._report(given, execution)
        except Exception as error:  # whatever it is, the scheduler must hear that the plan has ended
            ours = error if isinstance(error, TridentServeError) else None
            names = ", ".join(plan.request_ids)
            logger.warning("plan %d of %s failed: %s", plan.plan_id, names, error, exc_info=ours is None)
            # The text of an error of a library may quote the prompt: it stays in this worker's log.
            text = str(ours) if ours else f"{type(error).__name__} (more in the log of {self._config.spec.worker_id})"
            code, retry = (ours.code, _may_try_again(ours)) if ours else ("worker_failed", True)
            return PlanReport(plan.plan_id, "failed", error=text, retry=retry, code=code), []
        finally:
            self._controls.pop(plan.plan_id, None)
            self._needed.pop(plan.plan_id, None)

    async def _execute(self, given: _Given) -> Execution:
        plan, inputs, control = given.plan, given.inputs, given.control
        if control.stopped and plan.degree == 1:
            return Execution(stopped=True)
        try:
            # Weights and inputs come at the same time.
            incoming, loaded = await asyncio.gather(self._take_inputs(plan), self._load(given), return_exceptions=True)
            if isinstance(incoming, BaseException):
                raise incoming
            if isinstance(loaded, BaseException):
                raise loaded
        except BaseException:
            await self._on_device(self._executor.abandon, plan)
            raise
        given.peak.begin()
        is_leader = plan.leader == self._config.spec.worker_id  # who says to the others who has left
        staying = {
            name: inputs[name]
            for name in plan.request_ids
            if name in inputs and not (is_leader and self._handoff.has_left(name, plan.plan_id))
        }
        execution = await self._on_device(self._executor.execute, plan, staying, incoming, control, loaded)
        destinations = {member.request_id: member.push_to for member in plan.members}
        for request_id, parcel in execution.outputs.items():
            key = HandoffKey(request_id, plan.plan_id)
            self._handoff.keep(key, parcel)
            push_to = destinations[request_id]
            is_done = execution.paused_after is None
            if is_done and push_to is not None and push_to != self._config.spec.worker_id:
                self._handoff.push(key, push_to)
        return execution

    async def _load(self, given: _Given) -> bool:
        """Have in memory what the plan runs here. Returns whether it must be run frugally to fit."""
        own_id = given.plan.plan_id
        queued = {replica for plan_id, needed in self._needed.items() if plan_id != own_id for replica in needed}
        needed, expected = self._needed[own_id], given.expected.plus(self._lora_bytes(given))
        try:
            await self._replicas.prepare(needed, expected.num_bytes, queued, tell=given.tell)
        except OutOfMemoryError:
            if expected.frugal_bytes >= expected.num_bytes:
                raise
            await self._replicas.prepare(needed, expected.frugal_bytes, queued, tell=given.tell)
            return True
        return False

    def _lora_bytes(self, given: _Given) -> int:
        if Stage.DIFFUSE not in given.plan.stages:
            return 0
        folder = self._host_copies.source(Replica(given.plan.model, Stage.DIFFUSE)).folder
        return lora_bytes(folder, (inputs.lora for inputs in given.inputs.values()))

    async def _take_inputs(self, plan: DispatchPlan) -> dict[str, Parcel]:
        """On the leader, what was made of each member before; a member of a batch that has left meanwhile needs
        nothing."""
        incoming: dict[str, Parcel] = {}
        if plan.leader != self._config.spec.worker_id:
            return incoming
        for member in plan.members:
            if member.input_id is None or member.source is None:
                continue
            try:
                step = member.steps[0] if member.from_checkpoint and member.steps is not None else None
                key = HandoffKey(member.request_id, member.input_id, step)
                incoming[member.request_id] = await self._handoff.take(key, member.source)
            except HandoffError:
                if len(plan.members) == 1 or not self._handoff.has_left(member.request_id, plan.plan_id):
                    raise
        return incoming

    async def _report(self, given: _Given, execution: Execution) -> tuple[PlanReport, list[Output]]:
        plan, peak = given.plan, given.peak
        pictures: list[Output] = []
        num_images: dict[str, int] = {}
        for request_id, images in execution.images.items():
            pictures += await asyncio.to_thread(encoded_outputs, images, given.inputs[request_id])
            num_images[request_id] = len(images)
        self._metrics.plan_done(plan, execution.spans)
        if not execution.stopped:
            self._metrics.plan_peak(plan, peak.growth_bytes, given.expected.num_bytes)
            self._metrics.tiled_decodes(plan, len(execution.images) if execution.tiled else 0)
        report = PlanReport(
            plan_id=plan.plan_id,
            outcome="stopped" if execution.stopped else "finished",
            paused_after=execution.paused_after,
            spans=execution.spans,
            num_images=num_images,
            peak_memory_bytes=peak.total_bytes,
            peak_growth_bytes=peak.growth_bytes,
            expected_peak_bytes=given.expected.num_bytes,
            tiled=execution.tiled,
        )
        return report, pictures

    async def _on_device(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._device_thread, lambda: function(*args))

    # The handoff buffer, as peers call it.

    async def reserve(self, key: HandoffKey, producer: WorkerId, layout: Layout) -> int | None:
        return await self._handoff.reserve(key, producer, layout)

    async def release(self, key: HandoffKey) -> None:
        await self._handoff.release(key)

    async def deliver(self, key: HandoffKey, layout: Layout, buffer: NDArray[np.uint8]) -> None:
        await self._handoff.deliver(key, layout, torch.from_numpy(buffer.copy()))

    async def stow(self, key: HandoffKey) -> None:
        await self._handoff.stow(key)

    async def send(self, key: HandoffKey, to: WorkerId) -> None:
        await self._handoff.send(key, to)

    # The replicas, as peers ask for them.

    async def offers(self, replica: Replica) -> int | None:
        return self._replicas.offers(replica)

    async def send_weights(self, order: WeightOrder) -> None:
        await self._replicas.send(order)


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _may_try_again(error: TridentServeError) -> bool:
    """Whether the plan's requests may do better another time. What does not fit with nothing else in memory never will;
    what is wrong with a request stays wrong."""
    return error.http_status >= 500 and not isinstance(error, OutOfMemoryError)


def _post(loop: asyncio.AbstractEventLoop, notes: Notes, note: StepNote) -> None:
    """From the device thread into the event loop."""
    loop.call_soon_threadsafe(notes.put_nowait, note)


def _start_link(config: WorkerConfig, slab: torch.Tensor) -> NixlLink | None:
    """The NIXL agent of this incarnation; None when it is not wanted or cannot start."""
    if config.options.handoff_transport != "nixl":
        return None
    try:
        return NixlLink(f"{config.spec.worker_id}#{config.incarnation}#{config.store_port}", slab)
    except Exception as error:  # NIXL and UCX raise what they like; serving goes on without them
        logger.warning("NIXL cannot start, handoffs go through host memory: %s", error)
        return None
