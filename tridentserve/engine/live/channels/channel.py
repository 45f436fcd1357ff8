"""One end of a connection between two processes of the service: calls in both directions, in order, many in a message.

A call of a Ray actor costs the two processes a millisecond and more, an item of one of its streams twice that, and a
service of small images makes many of them for each request.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

logger = logging.getLogger(__name__)

# The system asks an end that is silent for 10 s whether it is there, and gives it up after 15 s more. It gives up one
# that takes nothing of what is sent to it after 30 s, whether its machine is gone or its process stands still.
_PATIENCE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
_LENGTH = struct.Struct("!Q")
_GREETING_BYTES = 32

# A call that is not urgent waits so long for another one.
LAZY_S = 0.2

# A call without an answer, one with an answer, an answer, and an answer that is an error.
_TELL, _ASK, _ANSWER, _ERROR = range(4)


class ChannelError(Exception):
    """The other end of a channel is gone, or a call failed there."""


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """The place where a process takes connections."""

    host: str
    port: int
    token: bytes
    """A secret of the two ends; it travels through Ray, and never through the connection."""


class Channel(asyncio.Protocol):
    """One end of a connection. The other end calls the public methods of `served`, by name: those that `tell` names are
    plain functions and run at once, in the order of the calls; those that `ask` names are coroutine functions.

    Both ends prove that they know the token before either unpickles anything. All methods belong to the event loop."""

    def __init__(
        self,
        token: bytes,
        role: Literal["client", "server"],
        serve: Callable[[Channel], object],
    ) -> None:
        """`serve` makes the object whose methods the other end calls, when the connection stands."""
        self._loop = asyncio.get_running_loop()
        self._greeting = _make_greeting(token, role)
        self._expected = _make_greeting(token, "server" if role == "client" else "client")
        self._serve = serve
        self._served: object = None
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._waiting: list[tuple[int, int, str, Any]] = []
        self._is_paused = self._will_flush = False
        self._lazy_flush: asyncio.TimerHandle | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        """Done when the other end has proved itself; fails when the connection ends before."""
        self.closed: asyncio.Future[str] = self._loop.create_future()
        """Done when the connection has ended, with the reason."""

    def tell(self, name: str, *args: Any) -> None:
        """Call a method of the other end. Nothing is known of its outcome; on a closed channel the call is lost."""
        self._send(_TELL, 0, name, args)

    def tell_lazily(self, name: str, *args: Any) -> None:
        """The same for a call that is not urgent: it goes with the next one, or after `LAZY_S`. A message of its own
        would wake the other end for it."""
        self._send(_TELL, 0, name, args, is_urgent=False)

    def ask(self, name: str, *args: Any) -> Awaitable[Any]:
        """Call a method of the other end for its result. The future raises `ChannelError` when the method raises there,
        or when the channel closes."""
        answer = self._loop.create_future()
        if self.closed.done():
            answer.set_exception(ChannelError(self.closed.result()))
            return answer
        number = next(self._numbers)
        self._asked[number] = answer
        answer.add_done_callback(lambda _: self._asked.pop(number, None))
        self._send(_ASK, number, name, args)
        return answer

    def close(self, reason: str = "this end has closed the connection") -> None:
        """End the connection at once. What was not sent yet is lost."""
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    # Sending.

    def _send(self, kind: int, number: int, name: str, content: Any, is_urgent: bool = True) -> None:
        if self.closed.done():
            return
        self._waiting.append((kind, number, name, content))
        if self._will_flush:
            return
        if is_urgent:
            self._will_flush = True
            self._loop.call_soon(self._flush)
        elif self._lazy_flush is None:
            self._lazy_flush = self._loop.call_later(LAZY_S, self._flush)

    def _flush(self) -> None:
        """Send all that waits as one message."""
        self._will_flush = False
        if self._lazy_flush is not None:
            self._lazy_flush.cancel()
            self._lazy_flush = None
        if self._is_paused or not self._waiting or self._transport is None or not self.opened.done():
            return
        calls, self._waiting = self._waiting, []
        try:
            content = pickle.dumps(calls, pickle.HIGHEST_PROTOCOL)
        except Exception:  # what cannot be pickled must not be lost in silence
            logger.exception("the calls %s cannot be sent", sorted({name for _, _, name, _ in calls}))
            self.close("a call could not be sent")
            return
        self._transport.writelines([_LENGTH.pack(len(content)), content])

    def pause_writing(self) -> None:
        """The other end takes less than comes: calls wait here, and go as one message later."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """The other end has caught up."""
        self._is_paused = False
        self._flush()

    # Receiving.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _set_options(transport.get_extra_info("socket"))
        self._transport.write(self._greeting)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self.opened.done() and not self._check_greeting():
            return
        while not self.closed.done() and len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            with memoryview(self._received) as view:
                content = bytes(view[_LENGTH.size : end])
            del self._received[:end]
            self._take(content)

    def _check_greeting(self) -> bool:
        """True when the other end has proved that it knows the token."""
        if len(self._received) < _GREETING_BYTES:
            return False
        if not hmac.compare_digest(bytes(self._received[:_GREETING_BYTES]), self._expected):
            logger.warning("a connection of a process that is not of this service was refused")
            self.close("the other end is not of this service")
            return False
        del self._received[:_GREETING_BYTES]
        self._served = self._serve(self)
        self.opened.set_result(None)
        self._flush()
        return True

    def _take(self, content: bytes) -> None:
        try:
            calls = pickle.loads(content)  # noqa: S301  of a process that knows the token
        except Exception:  # a class that this end does not know
            logger.exception("a message cannot be read")
            self.close("a message could not be read")
            return
        for kind, number, name, args in calls:
            if kind == _TELL:
                self._run_told(name, args)
            elif kind == _ASK:
                task = self._loop.create_task(self._answer(number, name, args))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            elif (answer := self._asked.get(number)) is not None and not answer.done():
                if kind == _ANSWER:
                    answer.set_result(args)
                else:
                    answer.set_exception(ChannelError(args))

    def _run_told(self, name: str, args: tuple[Any, ...]) -> None:
        try:
            self._find_method(name)(*args)
        except Exception:  # the calls behind it must not be lost with it
            logger.exception("the call of %s failed", name)

    async def _answer(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            result = await self._find_method(name)(*args)
        except Exception as error:  # whatever it is, the caller must hear of it
            self._send(_ERROR, number, "", str(error) or type(error).__name__)
        else:
            self._send(_ANSWER, number, "", result)

    def _find_method(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise ChannelError(f"{name} may not be called")
        method: Callable[..., Any] = getattr(self._served, name)
        return method

    # Ending.

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection broke: {exc}" if exc is not None else "the other end has closed the connection")

    def _end(self, reason: str) -> None:
        if self.closed.done():
            return
        self.closed.set_result(reason)
        if not self.opened.done():
            self.opened.set_exception(ChannelError(reason))
            self.opened.exception()  # marked as seen: nobody need wait for it
        self._waiting.clear()
        for answer in list(self._asked.values()):
            if not answer.done():
                answer.set_exception(ChannelError(reason))
                answer.exception()


def _make_greeting(token: bytes, role: str) -> bytes:
    return hmac.digest(token, role.encode(), "sha256")


def _set_options(connection: Any) -> None:
    """Have the system send small messages at once, and find out when the other end is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PATIENCE.items():
        if (option := getattr(socket, name, None)) is not None:  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
