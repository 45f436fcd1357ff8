"""The Ray actor of a worker (`StageWorker`), with the calls of the engine and of other workers, and the engine's handle
of it (`WorkerHandle`).

The parts of a worker need torch, which this module does not import: Ray wants the class of an actor where the actor is
started, and that import would cost the Scheduler's process nine seconds of CPU and 400 MB before the first worker could
begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.actor import ActorHandle

from tridentserve.engine.live.messages import (
    UNKNOWN_PEAK,
    ExpectedPeak,
    ModelSource,
    PlanNote,
    PlanReport,
    WorkerConfig,
    WorkerReady,
)
from tridentserve.plans import DispatchPlan, Replica, WorkerId
from tridentserve.requests import GenerationInputs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tridentserve.engine.live.handoff.peer import HandoffKey
    from tridentserve.engine.live.transport.parcel import ParcelLayout
    from tridentserve.engine.live.weights.peer_weights import WeightOrder
    from tridentserve.engine.live.worker.output_files import EncodedOutput


class StageWorker:
    """Holds Encode, Diffuse and Decode replicas as its placement says, on one device."""

    def __init__(self, config: WorkerConfig) -> None:
        from tridentserve.engine.live.worker.worker import WorkerParts

        self._parts = WorkerParts(config)

    def __repr__(self) -> str:
        """The name of the actor in Ray's dashboard."""
        config = self._parts.config
        return f"StageWorker({config.spec.worker_id}, {config.label})"

    # The worker itself, as the engine calls it.

    async def start(self) -> WorkerReady:
        """Make the node's host copies, together with its other workers, and load the replicas of the placement."""
        return await self._parts.start()

    async def connect_peers(self, peers: dict[WorkerId, tuple[ActorHandle[Any], WorkerReady]]) -> None:
        """Add peers; a peer that came back replaces its former self."""
        await self._parts.connect_peers(peers)

    async def make_groups(self) -> None:
        """Make the process groups of the hot set, together with the other workers."""
        await self._parts.make_groups()

    async def watch(self) -> None:
        """Never returns: a caller that waits for it gets an error as soon as this process ends."""
        await asyncio.Event().wait()

    async def count_parcels(self) -> int:
        """Parcels that the handoff buffer keeps: 0 when no request is under way."""
        return self._parts.handoff.num_parcels

    async def set_placement(self, replicas: frozenset[Replica], label: str) -> None:
        """Another placement is in force. Weights move when plans need them."""
        self._parts.config = replace(self._parts.config, replicas=replicas, label=label)
        self._parts.replicas.wanted = replicas

    async def add_model(self, source: ModelSource) -> None:
        """Another model may be asked for; its host copies have been made."""
        self._parts.host_copies.add_model(source)

    async def unload_model(self, number: int, model: str) -> None:
        """Drop all that is kept of a model, in turn (see `run_plan`): nothing of it runs or waits here any more."""
        await self._parts.unload_model(number, model)

    # Plans.

    async def run_plan(
        self,
        number: int,
        plan: DispatchPlan,
        inputs: dict[str, GenerationInputs],
        expected: ExpectedPeak = UNKNOWN_PEAK,
        is_watched: bool = False,
    ) -> AsyncIterator[PlanNote | PlanReport | EncodedOutput]:
        """Run a plan when its turn (`number`, from 0 without gaps) comes; see `PlanRunner.run_plan`."""
        async for item in self._parts.plan_runner.run_plan(number, plan, inputs, expected, is_watched):
            yield item

    async def stop_plan(self, plan_id: int) -> None:
        """Stop a plan at its next step boundary, or before it starts."""
        self._parts.step_controls.stop_plan(plan_id)

    async def pause_plan(self, plan_id: int) -> None:
        """Pause a plan at its next step boundary; its report says how far it came. D that has ended is not held up."""
        self._parts.step_controls.pause_plan(plan_id)

    async def watch_plan(self, plan_id: int) -> None:
        """Tell of the steps of a plan from now on."""
        self._parts.step_controls.watch_plan(plan_id)

    async def forget_request(self, request_id: str, last_plan_id: int, with_checkpoints: bool = True) -> None:
        """Drop what is kept of a request that has ended or starts again; its checkpoints stay when it resumes from one
        of them."""
        self._parts.handoff.forget_request(request_id, last_plan_id, with_checkpoints)

    # The handoff buffer, as peers call it (see `handoff.peer.Peer`).

    async def reserve_slot(self, key: HandoffKey, producer: WorkerId, layout: ParcelLayout) -> int | None:
        return await self._parts.handoff.reserve_slot(key, producer, layout)

    async def release_slot(self, key: HandoffKey) -> None:
        await self._parts.handoff.release_slot(key)

    async def deliver_parcel(self, key: HandoffKey, layout: ParcelLayout, buffer: NDArray[np.uint8]) -> None:
        await self._parts.deliver_parcel(key, layout, buffer)

    async def keep_checkpoint(self, key: HandoffKey) -> None:
        await self._parts.handoff.keep_checkpoint(key)

    async def send_output(self, key: HandoffKey, to: WorkerId) -> None:
        await self._parts.handoff.send_output(key, to)

    # The replicas, as peers call them (see `weights.peer_weights.WeightPeer`).

    async def count_readers(self, replica: Replica) -> int | None:
        return self._parts.replicas.count_readers(replica)

    async def send_weights(self, order: WeightOrder) -> None:
        await self._parts.replicas.send_weights(order)


class PlanCall(Protocol):
    """A plan under way on one worker (Ray's generator): references to its notes, its report and its outputs."""

    def __aiter__(self) -> PlanCall: ...

    async def __anext__(self) -> Awaitable[PlanNote | PlanReport]: ...

    def completed(self) -> Any:
        """The reference that stands for the end of the call, or for its error."""


class WorkerHandle:
    """The calls that the engine makes to a worker, typed: Ray's own handle of an actor is not. `StageWorker` says what
    each call does. A call is under way when its method returns; what is returned may be awaited for its answer, and
    raises `RayError` when the worker is lost."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self.actor = actor

    def start(self) -> Awaitable[WorkerReady]:
        answer: Awaitable[WorkerReady] = self.actor.start.remote()
        return answer

    def connect_peers(self, peers: Mapping[WorkerId, tuple[ActorHandle[Any], WorkerReady]]) -> Awaitable[None]:
        answer: Awaitable[None] = self.actor.connect_peers.remote(dict(peers))
        return answer

    def make_groups(self) -> Awaitable[None]:
        answer: Awaitable[None] = self.actor.make_groups.remote()
        return answer

    def watch(self) -> Awaitable[None]:
        answer: Awaitable[None] = self.actor.watch.remote()
        return answer

    def count_parcels(self) -> Awaitable[int]:
        answer: Awaitable[int] = self.actor.count_parcels.remote()
        return answer

    def set_placement(self, replicas: frozenset[Replica], label: str) -> Awaitable[None]:
        answer: Awaitable[None] = self.actor.set_placement.remote(replicas, label)
        return answer

    def add_model(self, source: ModelSource) -> Awaitable[None]:
        answer: Awaitable[None] = self.actor.add_model.remote(source)
        return answer

    def unload_model(self, number: int, model: str) -> Awaitable[None]:
        answer: Awaitable[None] = self.actor.unload_model.remote(number, model)
        return answer

    def run_plan(
        self,
        number: int,
        plan: DispatchPlan,
        inputs: Mapping[str, GenerationInputs],
        peak: ExpectedPeak,
        is_watched: bool,
    ) -> PlanCall:
        call: PlanCall = self.actor.run_plan.remote(number, plan, dict(inputs), peak, is_watched)
        return call

    def stop_plan(self, plan_id: int) -> None:
        self.actor.stop_plan.remote(plan_id)

    def pause_plan(self, plan_id: int) -> None:
        self.actor.pause_plan.remote(plan_id)

    def watch_plan(self, plan_id: int) -> None:
        self.actor.watch_plan.remote(plan_id)

    def forget_request(self, request_id: str, last_plan_id: int, with_checkpoints: bool) -> None:
        self.actor.forget_request.remote(request_id, last_plan_id, with_checkpoints)

    def kill(self) -> None:
        """End the worker's process."""
        ray.kill(self.actor)
