"""The `Backend` of the other replicas: the Scheduler deployment behind a handle of Ray Serve and a channel."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from deployments.model_updates.catalogue import Catalogue
from deployments.preparation.start_news import read_start_news
from deployments.serve.call_errors import translate_call_errors
from deployments.serve.gpu_shortage import describe_waiting
from tridentserve.cells.summary import CellSummary
from tridentserve.engine.live.channels.channel import Channel, ChannelError
from tridentserve.engine.live.channels.opening import LazyChannel, connect
from tridentserve.engine.live.updates import CompletedUpdate, FailedUpdate, Update
from tridentserve.models.lora_files import LoraFile
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling.events import Reject
from tridentserve.scheduling.prediction.predictor import Quote
from tridentserve.scheduling.watching.cluster_state import ClusterState

# A Scheduler that has not answered by then may still be starting.
_START_S = 2.0


class RemoteBackend:
    """Requests and their updates go over the channel, which is opened again when the Scheduler's replica was replaced;
    what is rare, or large, are calls of Ray Serve."""

    def __init__(self, handle: Any, num_gpus: int = 0) -> None:
        """`handle` is a `ray.serve.handle.DeploymentHandle`, whose types do not know of awaiting. `num_gpus` are those
        that the whole service wants."""
        self._handle = handle
        self._num_gpus = num_gpus
        self._inboxes = _CallInboxes()
        self._channel = LazyChannel(self._open_channel)

    async def generate(
        self, spec: RequestSpec, inputs: GenerationInputs, with_progress: bool = True
    ) -> AsyncIterator[Update]:
        call_id, has_ended = uuid.uuid4().hex, False
        with translate_call_errors():
            channel = await self._channel.get()
            inbox = self._inboxes.open(call_id)
            channel.tell("generate", call_id, spec, inputs, with_progress)
            try:
                while not has_ended:
                    update = await inbox.get()
                    if isinstance(update, ChannelError):
                        raise update
                    if isinstance(update, CompletedUpdate) and not update.outputs:
                        update = replace(update, outputs=await self._fetch_outputs(call_id))
                    has_ended = isinstance(update, CompletedUpdate | FailedUpdate)
                    yield update
            finally:
                self._inboxes.close(call_id)
                if not has_ended:
                    channel.tell("end_call", call_id)

    async def _fetch_outputs(self, call_id: str) -> tuple[Any, ...]:
        # The scheduler hands on references: the outputs come straight from their worker's node.
        return tuple(await asyncio.gather(*await self._handle.take_references.remote(call_id)))

    async def _open_channel(self) -> Channel:
        channel = await connect(await self._handle.get_address.remote(), self._inboxes)
        channel.closed.add_done_callback(lambda closed: self._inboxes.fail_all(closed.result()))
        return channel

    async def cancel(self, request_id: str) -> bool:
        return bool(await self._ask("cancel", request_id))

    async def quote(self, specs: Sequence[RequestSpec]) -> list[Quote | Reject | None]:
        quotes: list[Quote | Reject | None] = await self._ask("quote", list(specs))
        return quotes

    async def has_request(self, request_id: str) -> bool:
        """True when a request with this id is joined, if it is made again."""
        return bool(await self._ask("has_request", request_id))

    async def summarize_load(self) -> CellSummary:
        """The load of the scheduler, with all requests that were made from here before this call."""
        summary: CellSummary = await self._ask("summarize_load")
        return summary

    async def add_lora(self, model: str, name: str, path: str) -> LoraFile:
        with translate_call_errors():
            added: LoraFile = await self._handle.add_lora.remote(model, name, path)
            return added

    async def remove_lora(self, model: str, name: str) -> None:
        with translate_call_errors():
            await self._handle.remove_lora.remote(model, name)

    async def explain(self, request_id: str) -> dict[str, Any]:
        with translate_call_errors():
            return dict(await self._handle.explain.remote(request_id))

    async def describe_cluster(self, cursor: tuple[int, ...]) -> ClusterState:
        state: ClusterState = await self._ask("describe_cluster", cursor[0] if cursor else 0)
        return state

    async def _ask(self, name: str, *args: Any) -> Any:
        with translate_call_errors():
            return await (await self._channel.get()).ask(name, *args)

    async def get_catalogue(self, known_version: str | None, timeout_s: float) -> Catalogue:
        """Long-poll the models that take requests: return when they differ from `known_version`, or after `timeout_s`
        seconds."""
        with translate_call_errors():
            found: Catalogue = await self._handle.get_catalogue.remote(known_version, timeout_s)
            return found

    async def get_health(self) -> dict[str, Any]:
        """The health as the Scheduler tells it; while it starts, what it measures or how far its workers are warmed up,
        where it is at that, or that it waits for GPUs which Ray does not have."""
        asked = asyncio.ensure_future(self._ask_health())
        try:
            done, _ = await asyncio.wait([asked], timeout=_START_S)
            if not done and (told := await read_start_news()) is not None:
                topic, news = told
                return {"status": topic, "workers": 0, topic: dict(news)}
            if not done and (waiting := await describe_waiting(self._num_gpus)) is not None:
                return waiting
            return await asked
        finally:
            asked.cancel()

    async def _ask_health(self) -> dict[str, Any]:
        with translate_call_errors():
            return dict(await self._handle.get_health.remote())


class _CallInboxes:
    """The calls that wait for updates, by id. The Scheduler calls these methods over the channel."""

    def __init__(self) -> None:
        self._inboxes: dict[str, asyncio.Queue[Update | ChannelError]] = {}

    def open(self, call_id: str) -> asyncio.Queue[Update | ChannelError]:
        inbox = self._inboxes[call_id] = asyncio.Queue()
        return inbox

    def close(self, call_id: str) -> None:
        del self._inboxes[call_id]

    def take_updates(self, call_id: str, updates: list[Update]) -> None:
        if (inbox := self._inboxes.get(call_id)) is not None:  # whose caller has not left meanwhile
            for update in updates:
                inbox.put_nowait(update)

    def fail_all(self, why: str) -> None:
        """The channel is closed."""
        for inbox in self._inboxes.values():
            inbox.put_nowait(ChannelError(why))
