"""Stage workers as Ray actors on this machine, and plans for them made by hand."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from deployments.assembly.workers import make_worker_configs
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.messages import UNKNOWN_PEAK, ModelSource, PlanReport
from tridentserve.engine.live.spawning.start_options import list_start_options
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.worker.worker_actor import StageWorker
from tridentserve.engine.live.worker_handle import PlanItem, WorkerHandle
from tridentserve.engine.options import Fetch, WorkerOptions
from tridentserve.errors import WorkerError
from tridentserve.parallel import connect_store
from tridentserve.pipelines.loading import load_adapter
from tridentserve.plans import DispatchPlan, PlacementPlan, PlanMember, Replica, WorkerId
from tridentserve.requests import GenerationInputs
from tridentserve.scheduling.estimation.hot_groups import group_name
from tridentserve.stages import Stage

# Far more than any benchmark has under way on one worker.
_MAX_CONCURRENCY = 1000


class BenchWorker(StageWorker):
    """A stage worker that also lets what is inside it be timed."""

    async def read_parcel(self, key: HandoffKey) -> dict[str, NDArray[Any]]:
        """The tensors that a plan has left here."""
        parcel = await self._parts.handoff.fetch_parcel(key, self._parts.config.spec.worker_id)
        return {name: tensor.numpy() for name, tensor in parcel.tensors.items()}

    async def regroup(self, name: str, workers: Sequence[WorkerId], use: int) -> float:
        """Seconds from asking for a group to the end of its first collective."""
        rank = list(workers).index(self._parts.config.spec.worker_id)

        def run_first_collective() -> float:
            start_s = time.perf_counter()
            group = self._parts.groups.acquire(name, rank, len(workers), use, workers)
            group.agree()
            return time.perf_counter() - start_s

        return await self._parts.device_thread(run_first_collective)

    async def keep(self, key: HandoffKey, nbytes: int) -> None:
        """Keep an output of `nbytes` bytes, as a plan does."""
        self._parts.handoff.keep_output(key, Parcel({"bytes": torch.ones(nbytes, dtype=torch.uint8)}))

    async def push(self, key: HandoffKey, to: WorkerId) -> None:
        """Push a kept output; returns when it is in the other worker's buffer."""
        await self._parts.handoff.push_output(key, to)

    async def make(self, nbytes: int) -> None:
        """An output of `nbytes` bytes that `put` then puts."""
        self._made = np.ones(nbytes, np.uint8)

    async def put(self, as_tensor: bool) -> list[Any]:
        """The made output in Ray's object store instead, as a torch tensor or as the numpy array that Ray maps."""
        return [ray.put(torch.from_numpy(self._made) if as_tensor else self._made)]

    async def take(self, key: HandoffKey, source: WorkerId) -> int:
        """Take what was pushed here; its bytes."""
        return (await self._parts.handoff.fetch_parcel(key, source)).layout().nbytes

    async def get(self, references: list[Any]) -> int:
        """Take a copy out of the object store, as `take` does out of the buffer; its bytes."""
        value = await references[0]
        return int((value if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy())).nbytes)

    async def compute(self, seconds: float) -> int:
        """Compute matrix products on the device thread for that time, at least one, and return their number."""

        def multiply() -> int:
            matrix = torch.ones(256, 256)
            end_s, done = time.perf_counter() + seconds, 0
            while done == 0 or time.perf_counter() < end_s:
                torch.mm(matrix, matrix)
                done += 1
            return done

        return await self._parts.device_thread(multiply)

    async def set_fetch(self, fetch: Fetch) -> None:
        """Set the source from which replicas are fetched from now on."""
        self._parts.replicas.loader.fetch = fetch

    async def read_model_folder(self, replica: Replica) -> float:
        """Seconds to read the stage from its model folder into models of its own, as without a host copy."""
        source = self._parts.config.sources[replica.model]

        def read() -> float:
            start_s = time.perf_counter()
            load_adapter(source.folder, frozenset({replica.stage}))
            return time.perf_counter() - start_s

        return await self._parts.device_thread(read)

    async def load(self, replica: Replica) -> tuple[str, float, int]:
        """Evict a replica and load it again: where it came from, the seconds, the bytes."""
        loads: list[Any] = []
        replicas = self._parts.replicas
        if replica in replicas.resident:
            await replicas._evict(replica)
        await replicas.prepare((replica,), tell=loads.append)
        return loads[0].source, loads[0].seconds, loads[0].num_bytes


@dataclass(slots=True)
class Done:
    """A plan that has ended: its leader's report and images, and the seconds from call to report."""

    report: PlanReport
    images: list[bytes]
    seconds: float


class Workers:
    """Running workers."""

    def __init__(self, handles: dict[WorkerId, WorkerHandle]) -> None:
        self._handles = handles
        self._plan_ids = itertools.count(1)

    def make_plan(
        self,
        model: str,
        stages: tuple[Stage, ...],
        workers: Sequence[WorkerId],
        members: Sequence[PlanMember],
    ) -> DispatchPlan:
        group = group_name([(worker_id, 0) for worker_id in workers]) if len(workers) > 1 else None
        return DispatchPlan(next(self._plan_ids), model, stages, tuple(workers), tuple(members), group)

    async def run(self, plan: DispatchPlan, inputs: Mapping[str, GenerationInputs]) -> Done:
        """Run a plan on all its workers. Raises `RuntimeError` where one reports a failure."""
        start_s = time.perf_counter()
        content = {name: inputs[name] for name in plan.request_ids}
        handles = [self._handles[worker_id] for worker_id in plan.workers]
        items: list[asyncio.Queue[PlanItem]] = [asyncio.Queue() for _ in handles]
        for handle, came in zip(handles, items, strict=True):
            handle.run_plan(plan, content, UNKNOWN_PEAK, False, came.put_nowait)
        leader, *_ = await asyncio.gather(*(_wait_for_report(came) for came in items))
        images = [image for outputs in (leader.outputs or {}).values() for image in outputs]
        if leader.num_outputs and leader.outputs is None:
            images = [await reference async for reference in handles[0].collect_outputs(plan.plan_id)]
        return Done(leader, images, time.perf_counter() - start_s)

    async def call(self, worker_id: WorkerId, method: str, *args: Any) -> Any:
        """The result of a method of `BenchWorker`."""
        return await getattr(self._handles[worker_id].actor, method).remote(*args)

    async def forget(self, names: Sequence[str], last_plan_id: int | None = None) -> None:
        """Drop what is kept of these requests, of all plans up to this one; without one, of all."""
        last = next(self._plan_ids) if last_plan_id is None else last_plan_id
        for name, handle in itertools.product(names, self._handles.values()):
            handle.forget_request(name, last, with_checkpoints=True)
        await asyncio.gather(*(handle.count_parcels() for handle in self._handles.values()))  # behind these calls


async def _wait_for_report(came: asyncio.Queue[PlanItem]) -> PlanReport:
    while True:
        item = await came.get()
        if isinstance(item, WorkerError):
            raise RuntimeError(str(item))
        if isinstance(item, PlanReport):
            if item.outcome == "failed":
                raise RuntimeError(item.error)
            return item


@asynccontextmanager
async def run_workers(
    count: int,
    sources: Mapping[str, ModelSource],
    host_dir: Path,
    **changes: Any,
) -> AsyncIterator[Workers]:
    """`count` workers with one thread each and nothing loaded, connected with one another. `changes` are changes of
    their options."""
    store = connect_store(is_server=True)
    handles: dict[WorkerId, WorkerHandle] = {}
    specs = [WorkerSpec(f"w{index}", "node", 4 << 30) for index in range(count)]
    placement = PlacementPlan({spec.worker_id: frozenset() for spec in specs}, "nothing is loaded")
    options = WorkerOptions(host_dir=host_dir, **changes)
    for config in make_worker_configs(specs, placement, sources, {}, ("127.0.0.1", store.port), options):
        start = list_start_options(has_gpu=False)
        actor = {"num_cpus": options.num_cpus, "max_concurrency": _MAX_CONCURRENCY, **start}
        started: Any = ray.remote(BenchWorker).options(**actor).remote(config)
        handles[config.spec.worker_id] = WorkerHandle(started)
    try:
        ready = await asyncio.gather(*(handle.start() for handle in handles.values()))
        everyone = {w: (handle.actor, answer) for (w, handle), answer in zip(handles.items(), ready, strict=True)}
        await asyncio.gather(*(handle.connect_peers(everyone) for handle in handles.values()))
        await asyncio.gather(
            *(handle.open_channel(one.channel) for handle, one in zip(handles.values(), ready, strict=True))
        )
        yield Workers(handles)
    finally:
        for handle in handles.values():
            handle.kill()
        del store
