"""The calls that the engine makes to one worker, typed: Ray's own handle of an actor is not."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle

from tridentserve.engine.live.messages import ExpectedPeak, ModelSource, PlanNote, PlanReport, WorkerReady
from tridentserve.plans import DispatchPlan, Replica, WorkerId
from tridentserve.requests import GenerationInputs


class PlanCall(Protocol):
    """A plan under way on one worker (Ray's generator): references to its notes, its report and its outputs."""

    def __aiter__(self) -> PlanCall: ...

    async def __anext__(self) -> Awaitable[PlanNote | PlanReport]: ...

    def completed(self) -> Any:
        """The reference that stands for the end of the call, or for its error."""


class WorkerHandle:
    """See `worker.worker_actor.StageWorker` for what each call does. A call is under way when its method returns; what
    is returned may be awaited for its answer, and raises `RayError` when the worker is lost."""

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
        self, number: int, plan: DispatchPlan, inputs: Mapping[str, GenerationInputs], peak: ExpectedPeak
    ) -> PlanCall:
        call: PlanCall = self.actor.run_plan.remote(number, plan, dict(inputs), peak)
        return call

    def stop_plan(self, plan_id: int) -> None:
        self.actor.stop_plan.remote(plan_id)

    def pause_plan(self, plan_id: int) -> None:
        self.actor.pause_plan.remote(plan_id)

    def forget_request(self, request_id: str, last_plan_id: int, with_checkpoints: bool) -> None:
        self.actor.forget_request.remote(request_id, last_plan_id, with_checkpoints)

    def kill(self) -> None:
        """End the worker's process."""
        ray.kill(self.actor)
