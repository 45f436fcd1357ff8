"""A Scheduler deployment in this process, over a `FakeBackend`; its clients reach it over channels."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayTaskError

from deployments.serve.client_calls import ClientCalls, ClientGate
from tests.deployments.fake_backend import FakeBackend
from tridentserve.engine.live.channels.channel import Channel, ChannelAddress
from tridentserve.engine.live.channels.opening import ChannelListener, listen
from tridentserve.engine.live.updates import Update
from tridentserve.requests import GenerationInputs, RequestSpec


def as_ray_does(error: Exception) -> Exception:
    """An exception of the other side as it arrives here."""
    ray_task_error: Any = RayTaskError
    arrives: Exception = ray_task_error("generate", f"Traceback over there: {error}", error).as_instanceof_cause()
    return arrives


class FakeHandle:
    """The part of a Ray `DeploymentHandle` that is used, over a backend in this process, which a channel reaches."""

    def __init__(self, backend: FakeBackend, refuse: Exception | None = None) -> None:
        """`refuse` is raised by all calls of the handle."""
        self.gate = ClientGate(partial(_follow, backend))
        self.channels: list[Channel] = []
        self.refuse = refuse
        self.listener: ChannelListener | None = None
        self.get_address = SimpleNamespace(remote=self._get_address)
        self.take_references = SimpleNamespace(remote=self._take_references)
        self.cancel = SimpleNamespace(remote=backend.cancel)
        self.get_health = SimpleNamespace(remote=backend.get_health)

    async def _get_address(self) -> ChannelAddress:
        if self.refuse is not None:
            raise self.refuse
        if self.listener is None:
            self.listener = await listen("127.0.0.1", self._serve)
        return self.listener.address

    def _serve(self, channel: Channel) -> ClientCalls:
        self.channels.append(channel)
        return self.gate.serve(channel)

    async def _take_references(self, call_id: str) -> list[Any]:
        return self.gate.take_references(call_id)


async def _follow(
    backend: FakeBackend, spec: RequestSpec, inputs: GenerationInputs, with_progress: bool
) -> AsyncGenerator[list[Update], None]:
    async with aclosing(backend.generate(spec, inputs, with_progress)) as updates:
        async for update in updates:
            yield [update]
