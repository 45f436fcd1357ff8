"""A Scheduler deployment in this process, over a `FakeBackend`; its clients reach it over channels."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayTaskError

from deployments.serve.client_calls import ClientCalls, ClientGate
from tests.deployments.fake_backend import FakeBackend
from tridentserve.cells.summary import CellSummary
from tridentserve.engine.live.channels.channel import Channel, ChannelAddress
from tridentserve.engine.live.channels.opening import ChannelListener, listen
from tridentserve.engine.live.updates import Update
from tridentserve.errors import RequestNotFoundError
from tridentserve.models.lora_files import LoraFile
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling.events import Reject
from tridentserve.scheduling.prediction.predictor import Quote
from tridentserve.scheduling.watching.cluster_state import ClusterState


def as_ray_does(error: Exception) -> Exception:
    """An exception of the other side as it arrives here."""
    ray_task_error: Any = RayTaskError
    arrives: Exception = ray_task_error("generate", f"Traceback over there: {error}", error).as_instanceof_cause()
    return arrives


class FakeService:
    """A `RequestService` over a backend."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.summary = CellSummary({})

    def generate_in_batches(
        self, spec: RequestSpec, inputs: GenerationInputs, with_progress: bool = True
    ) -> AsyncGenerator[list[Update], None]:
        return self.backend.generate_in_batches(spec, inputs, with_progress)

    def has_request(self, request_id: str) -> bool:
        return request_id in self.backend.running

    def cancel(self, request_id: str) -> bool:
        if self.has_request(request_id):
            self.backend.deleted.add(request_id)
        return self.has_request(request_id)

    async def quote(self, specs: Sequence[RequestSpec]) -> list[Quote | Reject | None]:
        return await self.backend.quote(specs)

    async def summarize_load(self) -> CellSummary:
        return self.summary

    async def describe_cluster(self) -> ClusterState:
        return await self.backend.describe_cluster()


class FakeHandle:
    """The part of a Ray `DeploymentHandle` that is used, over a backend in this process, which a channel reaches."""

    def __init__(self, backend: FakeBackend, refuse: Exception | None = None, orphan_s: float = 0.0) -> None:
        """`refuse` is raised by all calls of the handle. `orphan_s`: see `ClientGate`."""
        self.service = FakeService(backend)
        self.gate = ClientGate(self.service, orphan_s)
        self.channels: list[Channel] = []
        self.refuse = refuse
        self.listener: ChannelListener | None = None
        self.get_address = SimpleNamespace(remote=self._get_address)
        self.take_references = SimpleNamespace(remote=self._take_references)
        self.explain = SimpleNamespace(remote=self._explain)
        self.get_health = SimpleNamespace(remote=backend.get_health)
        self.add_lora = SimpleNamespace(remote=self._add_lora)
        self.remove_lora = SimpleNamespace(remote=backend.remove_lora)

    async def _get_address(self) -> ChannelAddress:
        if self.refuse is not None:
            raise self.refuse
        if self.listener is None:
            self.listener = await listen("127.0.0.1", self._serve)
        return self.listener.address

    def _serve(self, channel: Channel) -> ClientCalls:
        self.channels.append(channel)
        return self.gate.serve(channel)

    async def _explain(self, request_id: str) -> dict[str, Any]:
        if self.refuse is not None:
            raise self.refuse
        try:
            return await self.service.backend.explain(request_id)
        except RequestNotFoundError as error:
            raise as_ray_does(error) from None

    async def _add_lora(self, model: str, name: str, path: str) -> LoraFile:
        if self.refuse is not None:
            raise as_ray_does(self.refuse)
        return await self.service.backend.add_lora(model, name, path)

    async def _take_references(self, call_id: str) -> list[Any]:
        return self.gate.take_references(call_id)
