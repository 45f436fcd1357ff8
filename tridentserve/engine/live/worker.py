"""The StageWorker: one Ray actor per device. It runs plans in the scheduler's order and moves tensors to its peers.

Device work happens in one thread; the event loop stays free for pings, cancels and pushes.
"""

from __future__ import annotations

import asyncio
import io
import logging
import resource
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from PIL import Image

from tridentserve.engine.live.executor import Execution, StageExecutor, StepControl
from tridentserve.engine.live.handoff import HandoffBuffer
from tridentserve.engine.live.handoff_peer import HandoffKey
from tridentserve.engine.live.messages import LinkAddress, PlanReport, StepNote, WorkerConfig, WorkerReady
from tridentserve.engine.live.metrics import GAUGE_PERIOD_S, WorkerMetrics
from tridentserve.engine.live.nixl_link import NixlLink
from tridentserve.engine.live.parcel import Layout, Parcel
from tridentserve.engine.live.peers import RayPeer
from tridentserve.engine.live.replicas import ReplicaStore
from tridentserve.engine.live.turns import Turns
from tridentserve.errors import HandoffError, TridentServeError
from tridentserve.parallel import GroupCache, connect_store
from tridentserve.plans import DispatchPlan, WorkerId
from tridentserve.requests import GenerationInputs

logger = logging.getLogger(__name__)

T = TypeVar("T")
# The content of each member of a plan.
Inputs = dict[str, GenerationInputs]
# Pictures are sent once and thrown away by most clients: speed counts more than the last tenth of their size.
_PNG_COMPRESS_LEVEL = 1


class StageWorker:
    """Holds Encode, Diffuse and Decode replicas as its placement says, on one device."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        torch.set_num_threads(config.num_threads)
        self._device = torch.device(config.torch_device)
        self._device_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self._turns = Turns()
        self._controls: dict[int, StepControl] = {}
        # Plans told to stop or to pause before their call came in (or after they ended, hence the bound).
        self._stopped_early: deque[int] = deque(maxlen=1024)
        self._paused_early: deque[int] = deque(maxlen=1024)
        self._metrics = WorkerMetrics(config.spec.worker_id)
        self._replicas = ReplicaStore(config.sources, config.torch_device)
        store = connect_store(config.store_host, config.store_port)
        groups = GroupCache(store, self._device, capacity=config.max_groups, timeout_s=config.group_timeout_s)
        self._executor = StageExecutor(config.spec.worker_id, self._replicas, groups)
        slab = torch.zeros(config.handoff_bytes, dtype=torch.uint8, device=self._device)
        self._link = _start_link(config, slab)
        self._peers: dict[WorkerId, RayPeer] = {}
        self._handoff = HandoffBuffer(config.spec.worker_id, self._peers, slab, self._link, self._metrics.handoff_done)

    def __repr__(self) -> str:
        return f"StageWorker({self._config.spec.worker_id}, {self._config.label})"

    async def start(self) -> WorkerReady:
        """Load the replicas of the placement."""
        for replica in sorted(self._config.replicas):
            await self._on_device(self._replicas.load, replica)
        self._reporter = asyncio.get_running_loop().create_task(self._report_levels())
        address = self._link.address if self._link is not None else None
        return WorkerReady(address, ray.get_runtime_context().get_node_id())

    async def connect(self, peers: dict[WorkerId, tuple[ray.actor.ActorHandle[Any], LinkAddress | None]]) -> None:
        """Get to know peers; a peer that came back replaces its former self."""
        for worker_id, (handle, address) in peers.items():
            if worker_id == self._config.spec.worker_id:
                continue
            former = self._peers.get(worker_id)
            if former is not None:
                self._handoff.lose_peer(worker_id)
                if self._link is not None and former.link_name is not None:
                    self._link.remove_peer(former.link_name)
            self._peers[worker_id] = RayPeer(handle, await self._link_to(address))

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
            await asyncio.sleep(GAUGE_PERIOD_S)

    async def watch(self) -> None:
        """Never returns: whoever waits for it hears at once when this process ends."""
        await asyncio.Event().wait()

    async def ping(self) -> int:
        """Parcels kept by the handoff buffer: 0 when no request is under way."""
        return self._handoff.num_parcels

    # Plans.

    async def run(
        self, number: int, plan: DispatchPlan, inputs: Inputs
    ) -> AsyncIterator[StepNote | PlanReport | bytes]:
        """Run a plan when its turn (`number`, from 0 without gaps) comes.

        Yields a note per request and denoising step (leader only), then one report, then the pictures, request by
        request."""
        notes: asyncio.Queue[StepNote | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        control = StepControl()
        if plan.leader == self._config.spec.worker_id:
            control.on_step = lambda request_id, done: _post(loop, notes, StepNote(request_id, done))
        self._controls[plan.plan_id] = control
        if plan.plan_id in self._stopped_early:
            control.stop()
        if plan.plan_id in self._paused_early:
            control.pause()
        task = loop.create_task(self._run_in_turn(number, plan, inputs, control))
        task.add_done_callback(lambda _: notes.put_nowait(None))
        while (note := await notes.get()) is not None:
            yield note
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

    async def forget(self, request_id: str, last_plan_id: int) -> None:
        """Drop what is kept of a request that has ended or starts again."""
        self._handoff.forget(request_id, last_plan_id)

    async def _run_in_turn(
        self, number: int, plan: DispatchPlan, inputs: Inputs, control: StepControl
    ) -> tuple[PlanReport, list[bytes]]:
        try:
            async with self._turns.turn(number):
                execution = await self._execute(plan, inputs, control)
            return await self._report(plan, execution)
        except Exception as error:  # whatever it is, the scheduler must hear that the plan has ended
            ours = error if isinstance(error, TridentServeError) else None
            names = ", ".join(plan.request_ids)
            logger.warning("plan %d of %s failed: %s", plan.plan_id, names, error, exc_info=ours is None)
            # The text of an error of a library may quote the prompt: it stays in this worker's log.
            text = str(ours) if ours else f"{type(error).__name__} (more in the log of {self._config.spec.worker_id})"
            code, retry = (ours.code, ours.http_status >= 500) if ours else ("worker_failed", True)
            return PlanReport(plan.plan_id, "failed", error=text, retry=retry, code=code), []
        finally:
            self._controls.pop(plan.plan_id, None)

    async def _execute(self, plan: DispatchPlan, inputs: Inputs, control: StepControl) -> Execution:
        if control.stopped and plan.degree == 1:
            return Execution(stopped=True)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        incoming: dict[str, Parcel] = {}
        if plan.leader == self._config.spec.worker_id:
            try:
                incoming = await self._take_inputs(plan)
            except BaseException:
                await self._on_device(self._executor.abandon, plan)
                raise
        staying = {name: inputs[name] for name in plan.request_ids if not self._handoff.has_left(name, plan.plan_id)}
        execution = await self._on_device(self._executor.execute, plan, staying, incoming, control)
        for request_id, parcel in execution.outputs.items():
            key = HandoffKey(request_id, plan.plan_id)
            self._handoff.keep(key, parcel)
            is_done = execution.paused_after is None
            if is_done and plan.push_to is not None and plan.push_to != self._config.spec.worker_id:
                self._handoff.push(key, plan.push_to)
        return execution

    async def _take_inputs(self, plan: DispatchPlan) -> dict[str, Parcel]:
        """What was made of each member before; a member of a batch that has left meanwhile needs nothing."""
        incoming = {}
        for member in plan.members:
            if member.input_id is None or member.source is None:
                continue
            try:
                key = HandoffKey(member.request_id, member.input_id)
                incoming[member.request_id] = await self._handoff.take(key, member.source)
            except HandoffError:
                if len(plan.members) == 1 or not self._handoff.has_left(member.request_id, plan.plan_id):
                    raise
        return incoming

    async def _report(self, plan: DispatchPlan, execution: Execution) -> tuple[PlanReport, list[bytes]]:
        pictures: list[bytes] = []
        num_images: dict[str, int] = {}
        for request_id, images in execution.images.items():
            pictures += await asyncio.to_thread(lambda images: [_png(image) for image in images], images)
            num_images[request_id] = len(images)
        self._metrics.plan_done(plan, execution.spans)
        report = PlanReport(
            plan_id=plan.plan_id,
            outcome="stopped" if execution.stopped else "finished",
            paused_after=execution.paused_after,
            spans=execution.spans,
            num_images=num_images,
            peak_memory_bytes=_peak_memory_bytes(self._device),
        )
        return report, pictures

    async def _on_device(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._device_thread, lambda: function(*args))

    # The handoff buffer, as peers call it.

    async def reserve(self, key: HandoffKey, producer: WorkerId, nbytes: int) -> int | None:
        return await self._handoff.reserve(key, producer, nbytes)

    async def commit(self, key: HandoffKey, layout: Layout) -> None:
        await self._handoff.commit(key, layout)

    async def release(self, key: HandoffKey) -> None:
        await self._handoff.release(key)

    async def deliver(self, key: HandoffKey, layout: Layout, buffer: NDArray[np.uint8]) -> None:
        await self._handoff.deliver(key, layout, torch.from_numpy(buffer.copy()))

    async def send(self, key: HandoffKey, to: WorkerId) -> None:
        await self._handoff.send(key, to)


def _post(loop: asyncio.AbstractEventLoop, notes: asyncio.Queue[StepNote | None], note: StepNote) -> None:
    """From the device thread into the event loop."""
    loop.call_soon_threadsafe(notes.put_nowait, note)


def _start_link(config: WorkerConfig, slab: torch.Tensor) -> NixlLink | None:
    """The NIXL agent of this incarnation; None when it is not wanted or cannot start."""
    if config.handoff_transport != "nixl":
        return None
    try:
        return NixlLink(f"{config.spec.worker_id}#{config.incarnation}#{config.store_port}", slab)
    except Exception as error:  # NIXL and UCX raise what they like; serving goes on without them
        logger.warning("NIXL cannot start, handoffs go through host memory: %s", error)
        return None


def _png(image: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", compress_level=_PNG_COMPRESS_LEVEL)
    return buffer.getvalue()


def _peak_memory_bytes(device: torch.device) -> int:
    """Peak of the device where it can be read, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
