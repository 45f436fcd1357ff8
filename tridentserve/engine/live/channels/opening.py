"""Opens channels: `listen` where a process takes them, `connect` and `LazyChannel` where it asks for one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from tridentserve.engine.live.channels.channel import Channel, ChannelAddress, ChannelError

# A process that does not take a connection for so long is treated as lost.
CONNECT_TIMEOUT_S = 30.0


class ChannelListener:
    """Takes connections of other processes of the service."""

    def __init__(self, server: asyncio.Server, address: ChannelAddress, channels: set[Channel]) -> None:
        self._server = server
        self._channels = channels
        self.address = address

    def close(self) -> None:
        """Close the channels, and take no others."""
        self._server.close()
        for channel in list(self._channels):
            channel.close()


async def listen(host: str, serve: Callable[[Channel], object]) -> ChannelListener:
    """Take connections on a free port of `host`. `serve` makes the object that the other end of each may call."""
    token = secrets.token_bytes(32)
    channels: set[Channel] = set()

    def accept() -> Channel:
        channel = Channel(token, "server", serve)
        channels.add(channel)
        channel.closed.add_done_callback(lambda _: channels.discard(channel))
        return channel

    server = await asyncio.get_running_loop().create_server(accept, host, 0)
    return ChannelListener(server, ChannelAddress(host, server.sockets[0].getsockname()[1], token), channels)


async def connect(address: ChannelAddress, served: object = None) -> Channel:
    """Open a channel to a process that listens, which may call the methods of `served`. Raises `ChannelError` when that
    fails."""
    channel: Channel | None = None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, channel = await asyncio.get_running_loop().create_connection(
                lambda: Channel(address.token, "client", lambda _: served), address.host, address.port
            )
            await channel.opened
    except (OSError, TimeoutError) as error:
        if channel is not None:
            channel.close("not answered")
        raise ChannelError(f"{address.host}:{address.port} does not answer: {error or 'no answer in time'}") from error
    return channel


class LazyChannel:
    """A channel that is opened at its first use, and again when it has broken."""

    def __init__(self, open_channel: Callable[[], Awaitable[Channel]]) -> None:
        """`open_channel` may raise `ChannelError`, or errors of its own, which `get` passes on."""
        self._open_channel = open_channel
        self._channel: Channel | None = None
        self._lock = asyncio.Lock()

    async def get(self) -> Channel:
        """The open channel."""
        channel = self._channel
        if channel is None or channel.closed.done():
            async with self._lock:
                channel = self._channel
                if channel is None or channel.closed.done():
                    channel = self._channel = await self._open_channel()
        return channel

    def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.close()
