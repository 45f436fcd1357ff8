"""Channels of these tests do not outlive them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.serve import remote_backend
from tests.deployments.serve import fake_scheduler
from tridentserve.engine.live.channels.channel import Channel, ChannelAddress
from tridentserve.engine.live.channels.opening import ChannelListener, connect, listen


@pytest.fixture
async def close_channels(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    opened: list[Channel | ChannelListener] = []

    async def connect_and_keep(address: ChannelAddress, served: object = None) -> Channel:
        channel = await connect(address, served)
        opened.append(channel)
        return channel

    async def listen_and_keep(host: str, serve: object) -> ChannelListener:
        listener = await listen(host, serve)  # type: ignore[arg-type]
        opened.append(listener)
        return listener

    monkeypatch.setattr(remote_backend, "connect", connect_and_keep)
    monkeypatch.setattr(fake_scheduler, "listen", listen_and_keep)
    yield
    for one in opened:
        one.close()
    await asyncio.sleep(0)
