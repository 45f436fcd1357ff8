"""Puts the parts of one worker together, connects them with peers, and starts them.

Device work happens in one thread; the event loop stays free for cancels, pushes and other calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.actor import ActorHandle

from tridentserve.device import find_device
from tridentserve.device.memory_limit import check_budget
from tridentserve.engine.live.channels.channel import Channel
from tridentserve.engine.live.channels.opening import ChannelListener, listen
from tridentserve.engine.live.handoff.buffer import HandoffBuffer
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.handoff.remote_peer import RemotePeer
from tridentserve.engine.live.messages import LinkAddress, WorkerConfig, WorkerReady
from tridentserve.engine.live.metrics import GAUGE_PERIOD_S, WorkerMetrics
from tridentserve.engine.live.previews.painter import PreviewPainter
from tridentserve.engine.live.transport.nixl_link import NixlLink
from tridentserve.engine.live.transport.parcel import ParcelLayout
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.peer_weights import PeerWeights
from tridentserve.engine.live.weights.replica_store import MemoryBudget, ReplicaStore
from tridentserve.engine.live.weights.weights_loader import WeightsLoader
from tridentserve.engine.live.worker.device_thread import DeviceThread
from tridentserve.engine.live.worker.executor import StageExecutor
from tridentserve.engine.live.worker.plan_runner import PlanRunner
from tridentserve.engine.live.worker.reporting.plan_reports import PlanReporter
from tridentserve.errors import ConfigError
from tridentserve.parallel import GroupCache, GroupMemory, connect_store
from tridentserve.pipelines.compile_cache import open_compile_cache
from tridentserve.plans import Replica, WorkerId
from tridentserve.scheduling.estimation.hot_groups import HotGroup
from tridentserve.stages import Stage

logger = logging.getLogger(__name__)


class WorkerParts:
    """The parts of a `StageWorker`, which calls them directly where one part does all that is asked."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        options = config.options
        torch.set_num_threads(options.num_threads)
        open_compile_cache(options.compile_dir)
        worker_id, device = config.spec.worker_id, torch.device(options.torch_device)
        self.device_thread = DeviceThread()
        self._metrics = WorkerMetrics(worker_id)
        self._order = asyncio.Lock()
        connect = partial(connect_store, config.store_host, config.store_port)
        self._group_memory = GroupMemory(find_device(device))
        self.groups = GroupCache(
            connect(),
            device,
            capacity=options.max_groups,
            timeout_s=options.group_timeout_s,
            connect=connect,
            memory=self._group_memory,
        )
        slab = torch.zeros(options.handoff_bytes, dtype=torch.uint8, device=device)
        self._link = _start_link(config, slab)
        self._peers: dict[WorkerId, RemotePeer] = {}
        self.host_copies = HostCopies(options.host_dir, config.sources, device)
        self._budget = MemoryBudget(
            config.spec.memory_bytes,
            options.handoff_bytes,
            options.group_bytes,
            self._group_memory.count_missing_bytes,
        )
        self.replicas = self._make_replica_store(device)
        self._executor = StageExecutor(
            worker_id, self.replicas, self.groups, find_device(device), options.hang_timeout_s
        )
        self.handoff = HandoffBuffer(worker_id, self._peers, slab, self._link, self._metrics.count_transfer)
        self._painter = PreviewPainter(self.host_copies)
        self.plan_reporter = PlanReporter(worker_id, self.handoff, self._metrics)
        self.plan_runner = PlanRunner(
            worker_id=worker_id,
            device=device,
            device_thread=self.device_thread,
            order=self._order,
            executor=self._executor,
            replicas=self.replicas,
            host_copies=self.host_copies,
            handoff=self.handoff,
            painter=self._painter,
            metrics=self._metrics,
            reporter=self.plan_reporter,
        )
        self._beside = find_device(device).make_side_thread("groups")
        self._making: set[asyncio.Future[None]] = set()
        self._reporter: asyncio.Task[None] | None = None
        self._listener: ChannelListener | None = None

    def _make_replica_store(self, device: torch.device) -> ReplicaStore:
        options, peers = self.config.options, None
        if self._link is not None:
            peers = PeerWeights(self._link, self._peers, _get_node_id(), options.block_bytes)
        spec = self.config.spec
        loader = WeightsLoader(
            self.host_copies,
            device,
            options.fetch,
            options.block_bytes,
            peers,
            self.config.shares,
            spec.place,
        )
        return ReplicaStore(
            self.host_copies,
            device,
            self._budget,
            self.device_thread,
            loader,
            peers,
            self._metrics.count_load,
            options.lora_bytes,
        )

    async def start(self, serve: Callable[[Channel], object]) -> WorkerReady:
        """Make the node's host copies, together with its other workers, and load the replicas of the placement. `serve`
        makes the object that the other end of each channel to this worker may call. Raises `ConfigError` for more
        memory than the device has."""
        sources = self.config.sources
        device = find_device(self.config.options.torch_device)
        await self.device_thread(check_budget, device, self.config.spec.memory_bytes)
        await self.device_thread(
            self.host_copies.make_all, [Replica(model, stage) for model in sources for stage in Stage]
        )
        await self.replicas.load_placement(frozenset(one for one in self.config.replicas if one.model in sources))
        self._reporter = asyncio.get_running_loop().create_task(self._report_levels())
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._listener = await listen(host, serve)
        return WorkerReady(
            address=self._link.address if self._link is not None else None,
            channel=self._listener.address,
            node_id=_get_node_id(),
            max_denoising=self.config.options.count_denoising(),
        )

    async def unload_model(self, model: str) -> None:
        """Drop all that is kept of a model, behind the plans that came before."""
        async with self._order:
            await self.replicas.unload_model(model)
            await self.device_thread(self._painter.drop_model, model)
            await self.device_thread(self.host_copies.drop_model, model)

    async def connect_peers(self, peers: Mapping[WorkerId, tuple[ActorHandle[Any], WorkerReady]]) -> None:
        """Add peers; a peer that came back replaces its former self."""
        for worker_id, (actor, ready) in peers.items():
            if worker_id == self.config.spec.worker_id:
                continue
            former = self._peers.get(worker_id)
            if former is not None:
                former.close()
                self.handoff.drop_peer(worker_id)
                self.device_thread.submit(self._executor.drop_groups_of, worker_id)
                if self._link is not None and former.link_name is not None:
                    self._link.remove_peer(former.link_name)
            link_name = await self._add_link(ready.address)
            self._peers[worker_id] = RemotePeer(
                actor, ready.channel, link_name, ready.node_id, shares_memory=ready.node_id == _get_node_id()
            )

    async def make_groups(self, groups: Sequence[HotGroup], number: int) -> int:
        """Make the process groups of the hot set, together with the other workers. Returns the bytes that this worker
        then reserves for groups beyond those that are planned for them."""
        await self.device_thread(self._executor.make_groups, groups, number)
        return self._budget.group_bytes - self._budget.planned_group_bytes

    def prepare_groups(self, groups: Sequence[HotGroup], number: int) -> None:
        """Make those that are not there, in a thread of their own."""
        task = asyncio.ensure_future(self._beside(self._executor.prepare_groups, groups, number))
        self._making.add(task)
        task.add_done_callback(self._making.discard)

    def abort_groups_of(self, worker_id: WorkerId) -> None:
        """Give up the collectives with a worker that is lost. The device thread may be waiting in one."""
        asyncio.get_running_loop().run_in_executor(None, self._executor.abort_groups_of, worker_id)

    async def deliver_parcel(self, key: HandoffKey, layout: ParcelLayout, buffer: NDArray[np.uint8]) -> None:
        """Add a parcel that came through Ray. Its buffer is copied, because Ray's is read-only."""
        device = find_device(self.config.options.torch_device)
        host = await asyncio.to_thread(device.make_host_buffer, buffer.nbytes)
        await asyncio.to_thread(np.copyto, host.numpy(), buffer)
        await self.handoff.deliver_parcel(key, layout, host)

    async def _add_link(self, address: LinkAddress | None) -> str | None:
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
            self._metrics.set_handoff_levels(self.handoff)
            self._metrics.set_resident_bytes(self.replicas.resident_bytes)
            self._metrics.set_lora_bytes(self.replicas.loras.num_bytes)
            self._metrics.set_group_bytes(self._budget.group_bytes, self._group_memory.largest_bytes)
            await asyncio.sleep(GAUGE_PERIOD_S)


def _get_node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _start_link(config: WorkerConfig, slab: torch.Tensor) -> NixlLink | None:
    """The NIXL agent of this incarnation; None when it is not wanted or cannot start. Raises `ConfigError` for a
    setting of torch that is in its way."""
    if config.options.handoff_transport != "nixl":
        return None
    if (obstacle := find_device(slab.device).find_nixl_obstacle()) is not None:
        raise ConfigError(f"NIXL cannot send memory of this device under {obstacle}: unset it, or use transport `host`")
    try:
        return NixlLink(f"{config.spec.worker_id}#{config.incarnation}#{config.store_port}", slab)
    except Exception as error:  # NIXL and UCX raise what they like; the worker serves without them
        logger.warning("NIXL cannot start, handoffs go through host memory: %s", error)
        return None
