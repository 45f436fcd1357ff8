"""Calls over channels arrive whole, once, in order, and only from processes of the service; a break is told to all."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import until
from tridentserve.engine.live.channels.channel import Channel, ChannelAddress, ChannelError
from tridentserve.engine.live.channels.opening import LazyChannel, connect, listen

HOST = "127.0.0.1"


class Served:
    """What the other end may call."""

    def __init__(self) -> None:
        self.noted: list[object] = []
        self.unpickled: list[str] = []
        self.allowed = asyncio.Event()

    def note(self, value: object) -> None:
        self.noted.append(value)

    def fail(self) -> None:
        raise ValueError("a defect")

    def _hidden(self) -> None:
        self.noted.append("hidden")

    async def double(self, value: int) -> int:
        return 2 * value

    async def wait(self) -> str:
        await self.allowed.wait()
        return "waited"

    async def refuse(self) -> None:
        raise ValueError("not today")


@asynccontextmanager
async def connected(at_client: Served | None = None) -> AsyncIterator[tuple[Channel, Served, list[Channel]]]:
    """A channel to a process that listens, what is served there, and the ends of channels over there, which may call
    `at_client`."""
    served, ends = Served(), list[Channel]()

    def serve(channel: Channel) -> Served:
        ends.append(channel)
        return served

    listener = await listen(HOST, serve)
    channel = await connect(listener.address, at_client)
    yield channel, served, ends
    channel.close()
    listener.close()
    await asyncio.sleep(0)


async def test_calls_arrive_in_their_order_and_answers_belong_to_their_calls() -> None:
    async with connected() as (channel, served, _):
        answers = []
        for number in range(100):
            channel.tell("note", number)
            answers.append(channel.ask("double", number))
        assert await asyncio.gather(*answers) == [2 * number for number in range(100)]
        assert served.noted == list(range(100))


async def test_calls_of_one_moment_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, take = [], Channel._take

    def count(channel: Channel, content: bytes) -> None:
        messages.append(content)
        take(channel, content)

    monkeypatch.setattr(Channel, "_take", count)
    async with connected() as (channel, served, _):
        for number in range(10):
            channel.tell("note", number)
        await until(lambda: len(served.noted) == 10)
        assert len(messages) == 1


async def test_a_call_without_haste_goes_with_the_next_one_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tridentserve.engine.live.channels.channel.LAZY_S", 3600.0)
    async with connected() as (channel, served, _):
        channel.tell_lazily("note", 1)
        await asyncio.sleep(0.02)
        assert served.noted == []
        channel.tell("note", 2)
        channel.tell_lazily("note", 3)
        await until(lambda: len(served.noted) == 3)
        assert served.noted == [1, 2, 3]
        channel.tell_lazily("note", 4)
        assert await channel.ask("double", 1) == 2
        assert served.noted == [1, 2, 3, 4]


async def test_a_call_without_haste_goes_by_itself_where_no_other_follows() -> None:
    async with connected() as (channel, served, _):
        for number in (1, 2, 3):
            channel.tell_lazily("note", number)
            await until(lambda: len(served.noted) == number)  # noqa: B023  awaited here
        assert served.noted == [1, 2, 3]


async def test_both_ends_call() -> None:
    async with connected(Served()) as (channel, _, ends):
        assert await channel.ask("double", 3) == 6
        assert await ends[0].ask("double", 4) == 8


async def test_an_answer_that_takes_its_time_holds_up_no_other_call() -> None:
    async with connected() as (channel, served, _):
        slow = asyncio.ensure_future(channel.ask("wait"))
        assert await channel.ask("double", 1) == 2
        assert not slow.done()
        served.allowed.set()
        assert await slow == "waited"


async def test_a_call_that_fails_takes_no_other_with_it(caplog: pytest.LogCaptureFixture) -> None:
    async with connected() as (channel, served, _):
        channel.tell("fail")
        channel.tell("note", 1)
        with pytest.raises(ChannelError, match="not today"):
            await channel.ask("refuse")
        assert served.noted == [1]
        assert "the call of fail failed" in caplog.text


@pytest.mark.parametrize("name", ["_hidden", "__init__", "nothing"])
async def test_only_public_methods_are_called(name: str) -> None:
    async with connected() as (channel, served, _):
        with pytest.raises(ChannelError):
            await channel.ask(name)
        assert served.noted == []


async def test_what_cannot_be_sent_closes_the_channel_instead_of_being_lost(caplog: pytest.LogCaptureFixture) -> None:
    async with connected() as (channel, _, _):
        channel.tell("note", lambda: None)
        assert await channel.closed == "a call could not be sent"
        assert "['note'] cannot be sent" in caplog.text


async def test_a_break_ends_the_calls_that_wait() -> None:
    async with connected() as (channel, _, ends):
        waiting = asyncio.ensure_future(channel.ask("wait"))
        await until(lambda: bool(ends))
        await channel.ask("double", 1)
        ends[0].close()
        with pytest.raises(ChannelError, match=r"has closed the connection|broke"):
            await waiting
        with pytest.raises(ChannelError):
            await channel.ask("double", 1)
        channel.tell("note", 1)  # is lost, without an error


async def test_large_messages_arrive_whole() -> None:
    content = os.urandom(20 << 20)
    async with connected() as (channel, served, _):
        channel.tell("note", content)
        channel.tell("note", "behind it")
        await until(lambda: len(served.noted) == 2)
        assert served.noted == [content, "behind it"]


class Poison:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("greeting", [bytes(32), b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(20)])
async def test_a_process_that_does_not_know_the_token_is_refused_before_anything_is_read(
    greeting: bytes, tmp_path: Any
) -> None:
    mark = tmp_path / "unpickled"
    content = pickle.dumps([(0, 0, "note", (Poison(str(mark)),))])
    served: list[Channel] = []

    def serve(channel: Channel) -> None:
        served.append(channel)

    listener = await listen(HOST, serve)
    reader, writer = await asyncio.open_connection(listener.address.host, listener.address.port)
    writer.write((greeting or bytes(32)) + len(content).to_bytes(8, "big") + content)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(1000)
    assert not mark.exists()
    assert not served
    writer.close()
    listener.close()


async def test_a_server_that_does_not_know_the_token_is_refused(tmp_path: Any) -> None:
    """Another process may have got the port of one that has died."""
    listener = await listen(HOST, lambda _: None)
    wrong = ChannelAddress(listener.address.host, listener.address.port, b"another token")
    with pytest.raises(ChannelError):
        await connect(wrong)
    listener.close()


async def test_nobody_listens() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ChannelError, match=f"{HOST}:{port} does not answer"):
        await connect(ChannelAddress(HOST, port, b"token"))


async def test_a_slow_reader_gets_all_and_one_that_reads_nothing_is_given_up() -> None:
    content = bytes(1 << 20)
    async with connected() as (channel, served, ends):
        await channel.ask("double", 1)
        transport: Any = ends[0]._transport
        transport.pause_reading()
        for _ in range(32):
            channel.tell("note", content)
            await asyncio.sleep(0)
        await until(lambda: channel._is_paused)
        channel.tell("note", "later")
        assert not served.noted or served.noted[-1] != "later"
        transport.resume_reading()
        await until(lambda: bool(served.noted) and served.noted[-1] == "later")
        assert len(served.noted) == 33
        sender: Any = channel._transport
        sender.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 100)
        transport.pause_reading()
        for _ in range(32):
            channel.tell("note", content)
            await asyncio.sleep(0)
        assert "timed out" in await channel.closed


async def test_a_lazy_channel_is_opened_once_and_again_after_a_break() -> None:
    served = Served()
    listener = await listen(HOST, lambda _: served)
    opened: list[Channel] = []

    async def open_channel() -> Channel:
        opened.append(await connect(listener.address))
        return opened[-1]

    lazy = LazyChannel(open_channel)
    first, again = await asyncio.gather(lazy.get(), lazy.get())
    assert (first is again, len(opened)) == (True, 1)
    first.close()
    assert await (await lazy.get()).ask("double", 2) == 4
    assert len(opened) == 2
    lazy.close()
    listener.close()


class _Pipe:
    """In place of a transport: keeps what is written."""

    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: list[bytes]) -> None:
        for part in parts:
            self.write(part)

    def abort(self) -> None: ...

    def get_extra_info(self, name: str) -> Any:
        return SimpleNamespace(setsockopt=lambda *args: None)


@given(values=st.lists(st.binary(max_size=300), max_size=20), cuts=st.lists(st.integers(1, 400), max_size=30))
def test_messages_may_be_cut_anywhere(values: list[bytes], cuts: list[int]) -> None:
    async def check() -> None:
        served, sender, receiver = Served(), _Pipe(), _Pipe()
        client: Any = Channel(b"token", "client", lambda _: None)
        server: Any = Channel(b"token", "server", lambda _: served)
        client.connection_made(sender)
        server.connection_made(receiver)
        client.data_received(bytes(receiver.written))
        for value in values:
            client.tell("note", value)
            await asyncio.sleep(0)
        for piece in _cut(bytes(sender.written), cuts):
            server.data_received(piece)
        assert served.noted == values

    asyncio.run(check())


def _cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    for size in sizes:
        if data:
            yield data[:size]
            data = data[size:]
    if data:
        yield data
