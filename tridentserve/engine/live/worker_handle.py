"""The engine's handle of a worker: the calls of its actor, and those over the channel to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from tridentserve.engine.live.channels.channel import Channel, ChannelAddress
from tridentserve.engine.live.channels.opening import connect
from tridentserve.engine.live.messages import ExpectedPeak, ModelSource, PlanNote, PlanReport, WorkerReady
from tridentserve.errors import WorkerError
from tridentserve.plans import DispatchPlan, Replica, WorkerId
from tridentserve.requests import GenerationInputs
from tridentserve.scheduling.estimation.hot_groups import HotGroup

# Other workers, and where they are reached.
Peers = dict[WorkerId, tuple[ActorHandle[Any], WorkerReady]]
# What comes of a plan on one worker: notes, and at last its report; or an error, when the worker is lost before.
PlanItem = PlanNote | PlanReport | WorkerError


class WorkerHandle:
    """The calls that the engine makes to a worker, typed. `StageWorker` and `WorkerCalls` say what each does. A call is
    under way when its method returns; what is returned may be awaited for its answer, and raises `RayError` or
    `ChannelError` when the worker is lost. Those over the channel arrive in their order."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self.actor = actor
        self._channel: Channel | None = None
        self._plans = _PlanCalls()

    # Through Ray.

    def start(self) -> Awaitable[WorkerReady]:
        answer: Awaitable[WorkerReady] = self.actor.start.remote()
        return answer

    def connect_peers(self, peers: Peers | ray.ObjectRef[Peers]) -> Awaitable[None]:
        """`peers`: or Ray's reference to them, where many workers get the same ones."""
        answer: Awaitable[None] = self.actor.connect_peers.remote(peers)
        return answer

    def watch(self) -> Awaitable[None]:
        answer: Awaitable[None] = self.actor.watch.remote()
        return answer

    def set_placement(self, replicas: frozenset[Replica], label: str) -> Awaitable[None]:
        answer: Awaitable[None] = self.actor.set_placement.remote(replicas, label)
        return answer

    def add_model(self, source: ModelSource) -> Awaitable[None]:
        answer: Awaitable[None] = self.actor.add_model.remote(source)
        return answer

    def collect_outputs(self, plan_id: int) -> Any:
        """Ray's generator of references."""
        return self.actor.collect_outputs.remote(plan_id)

    def kill(self) -> None:
        """End the worker's process."""
        if self._channel is not None:
            self._channel.close()
        ray.kill(self.actor)

    def fail_plans(self, why: str) -> None:
        """The worker is lost, and so are its plans. Before its loss has been told, they would be retried on it."""
        self._plans.fail_all(why)

    async def wait_until_idle(self) -> None:
        """Wait until it has no plan under way; at once where it has none."""
        await self._plans.idle.wait()

    # Over the channel.

    async def open_channel(self, address: ChannelAddress) -> None:
        """Open the channel to the worker, which has started. Raises `ChannelError`."""
        self._channel = await connect(address, self._plans)

    async def wait_for_break(self) -> str:
        """Wait until the channel is closed; returns why it was."""
        return await asyncio.shield(self._require_channel().closed)

    def run_plan(
        self,
        plan: DispatchPlan,
        inputs: Mapping[str, GenerationInputs],
        peak: ExpectedPeak,
        is_watched: bool,
        take: Callable[[PlanItem], None],
    ) -> None:
        """`take` is called with each item as it comes, and must not raise."""
        self._plans.begin(plan.plan_id, take)
        self._require_channel().tell("run_plan", plan, dict(inputs), peak, is_watched)

    def make_groups(self, groups: Sequence[HotGroup], number: int) -> Awaitable[int]:
        return self._require_channel().ask("make_groups", groups, number)

    def prepare_groups(self, groups: Sequence[HotGroup], number: int) -> None:
        self._require_channel().tell("prepare_groups", groups, number)

    def abort_groups_of(self, worker_id: WorkerId) -> None:
        self._require_channel().tell("abort_groups_of", worker_id)

    def abort_groups_of_plan(self, plan_id: int) -> None:
        self._require_channel().tell("abort_groups_of_plan", plan_id)

    def stop_plan(self, plan_id: int) -> None:
        self._require_channel().tell("stop_plan", plan_id)

    def pause_plan(self, plan_id: int) -> None:
        self._require_channel().tell("pause_plan", plan_id)

    def watch_plan(self, plan_id: int) -> None:
        self._require_channel().tell("watch_plan", plan_id)

    def forget_request(self, request_id: str, last_plan_id: int, with_checkpoints: bool) -> None:
        self._require_channel().tell_lazily("forget_request", request_id, last_plan_id, with_checkpoints)

    def count_parcels(self) -> Awaitable[int]:
        return self._require_channel().ask("count_parcels")

    def unload_model(self, model: str) -> Awaitable[None]:
        return self._require_channel().ask("unload_model", model)

    def _require_channel(self) -> Channel:
        if self._channel is None:
            raise WorkerError("the worker has not been connected")
        return self._channel


class _PlanCalls:
    """Those who wait for the plans under way on one worker, which calls these methods."""

    def __init__(self) -> None:
        self._takers: dict[int, Callable[[PlanItem], None]] = {}
        self.idle = asyncio.Event()
        """Set while there is none."""
        self.idle.set()

    def begin(self, plan_id: int, take: Callable[[PlanItem], None]) -> None:
        self._takers[plan_id] = take
        self.idle.clear()

    def take_note(self, plan_id: int, note: PlanNote) -> None:
        if (take := self._takers.get(plan_id)) is not None:  # a checkpoint may arrive after the end of its plan
            take(note)

    def take_report(self, report: PlanReport) -> None:
        take = self._takers.pop(report.plan_id)
        if not self._takers:
            self.idle.set()
        take(report)

    def fail_all(self, why: str) -> None:
        takers, self._takers = self._takers, {}
        self.idle.set()
        for take in takers.values():
            take(WorkerError(why))
