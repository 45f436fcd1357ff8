"""The calls of a worker over its channels (see `channels.channel`): of the engine, and of other workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tridentserve.engine.live.channels.channel import Channel
from tridentserve.engine.live.handoff.peer import HandoffKey
from tridentserve.engine.live.messages import ExpectedPeak
from tridentserve.engine.live.transport.parcel import ParcelLayout
from tridentserve.engine.live.weights.peer_weights import WeightOrder
from tridentserve.engine.live.worker.worker import WorkerParts
from tridentserve.plans import DispatchPlan, Replica, WorkerId
from tridentserve.requests import GenerationInputs
from tridentserve.scheduling.estimation.hot_groups import HotGroup


class WorkerCalls:
    """The calls that come over one channel. The other end gets the notes and reports of the plans that it gives, by its
    methods `take_note` and `take_report`."""

    def __init__(self, parts: WorkerParts, channel: Channel) -> None:
        self._parts = parts
        self._channel = channel

    # Of the engine.

    def run_plan(
        self, plan: DispatchPlan, inputs: dict[str, GenerationInputs], expected: ExpectedPeak, is_watched: bool
    ) -> None:
        """Run a plan behind those that came before it; see `PlanRunner.start_plan`."""
        runner, tell = self._parts.plan_runner, self._channel.tell
        runner.start_plan(
            plan,
            inputs,
            expected,
            is_watched,
            lambda note: tell("take_note", plan.plan_id, note),
            lambda report: tell("take_report", report),
        )

    async def make_groups(self, groups: Sequence[HotGroup], number: int) -> int:
        """Make the process groups of the hot set, together with the other workers, before there are plans; see
        `WorkerParts.make_groups`."""
        return await self._parts.make_groups(groups, number)

    def prepare_groups(self, groups: Sequence[HotGroup], number: int) -> None:
        """Make those of the hot set that are not there, beside the plans."""
        self._parts.prepare_groups(groups, number)

    def abort_groups_of(self, worker_id: WorkerId) -> None:
        """The process of a worker has ended: what waits for it in a collective gives up."""
        self._parts.abort_groups_of(worker_id)

    def abort_groups_of_plan(self, plan_id: int) -> None:
        """A plan has failed on another worker: this one gives its collectives up."""
        self._parts.plan_runner.abort_groups(plan_id)

    def stop_plan(self, plan_id: int) -> None:
        """Stop a plan at its next step boundary, or before it starts."""
        if (control := self._parts.plan_runner.find_control(plan_id)) is not None:
            control.ask_to_stop()

    def pause_plan(self, plan_id: int) -> None:
        """Pause a plan at its next step boundary; its report says how far it came. D that has ended is not held up."""
        if (control := self._parts.plan_runner.find_control(plan_id)) is not None:
            control.ask_to_pause()

    def watch_plan(self, plan_id: int) -> None:
        """Tell of the steps of a plan from now on."""
        if (control := self._parts.plan_runner.find_control(plan_id)) is not None:
            control.ask_to_tell()

    def forget_request(self, request_id: str, last_plan_id: int, with_checkpoints: bool) -> None:
        """Drop what is kept of a request that has ended or starts again; its checkpoints stay when it resumes from one
        of them."""
        self._parts.handoff.forget_request(request_id, last_plan_id, with_checkpoints)

    async def count_parcels(self) -> int:
        """Parcels that the handoff buffer keeps: 0 when no request is under way."""
        return self._parts.handoff.num_parcels

    async def unload_model(self, model: str) -> None:
        """Drop all that is kept of a model, behind the plans that came before: nothing of it runs or waits then."""
        await self._parts.unload_model(model)

    # The handoff buffer, as peers call it (see `handoff.peer.Peer`).

    async def reserve_slot(self, key: HandoffKey, producer: WorkerId, layout: ParcelLayout) -> int | None:
        return await self._parts.handoff.reserve_slot(key, producer, layout)

    async def release_slot(self, key: HandoffKey) -> None:
        await self._parts.handoff.release_slot(key)

    async def deliver_file(self, key: HandoffKey, layout: ParcelLayout, path: Path) -> None:
        await self._parts.handoff.deliver_file(key, layout, path)

    async def keep_checkpoint(self, key: HandoffKey) -> None:
        await self._parts.handoff.keep_checkpoint(key)

    async def send_output(self, key: HandoffKey, to: WorkerId) -> None:
        await self._parts.handoff.send_output(key, to)

    # The replicas, as peers call them (see `weights.peer_weights.WeightPeer`).

    async def count_readers(self, replica: Replica, shard: int) -> int | None:
        return self._parts.replicas.count_readers(replica, shard)

    async def send_weights(self, order: WeightOrder) -> None:
        await self._parts.replicas.send_weights(order)
