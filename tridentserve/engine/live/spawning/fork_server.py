"""The process that has imported what workers need, and forks one for each connection of `forked_start`."""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tridentserve.engine.live.spawning.forked_start import FORKED

# All that takes long, but not Ray: it reads its settings, and the job, from the environment when it is imported.
_IMPORTED = ("tridentserve.engine.live.weights.host_copies", "tridentserve.parallel")
# A server without workers ends after this time.
_IDLE_S = 300.0
_MAX_REQUEST_BYTES = 1 << 20
_NUM_STREAMS = 3


def serve(listening: int, raylet: int) -> None:
    """Fork a process for each connection to the socket of this number, until Ray's process on this node has ended, or
    there were no workers for five minutes. In a forked process it returns when the worker has ended."""
    for module in _IMPORTED:
        import_module(module)
    gc.freeze()
    _leave_streams()
    with socket.socket(fileno=listening) as listener:
        path = Path(listener.getsockname())
        worker = _fork_workers(listener, os.pidfd_open(raylet))
        if worker is None:
            path.unlink(missing_ok=True)
    if worker is not None:
        _run(worker)


def _leave_streams() -> None:
    """Write nowhere from now on: whoever reads what the first worker writes waits for its end."""
    with Path(os.devnull).open("wb") as nowhere:
        for number in range(_NUM_STREAMS):
            os.dup2(nowhere.fileno(), number)


def _fork_workers(listener: socket.socket, raylet: int) -> list[str] | None:
    """The arguments of the worker, in a forked process; None in the server when it is to end."""
    woken, ended = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(ended, warn_on_full_buffer=False)
    num_alive = 0
    while True:
        readable, _, _ = select.select([listener.fileno(), raylet, woken], [], [], None if num_alive else _IDLE_S)
        if raylet in readable or not (readable or num_alive):
            return None
        if woken in readable:
            with suppress(BlockingIOError):
                os.read(woken, 1 << 16)
            num_alive -= _reap()
        if listener.fileno() in readable:
            connection, _ = listener.accept()
            with connection:
                request, streams, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, _NUM_STREAMS)
                if not request:  # whoever asked has ended
                    continue
                if os.fork() == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for number in (woken, ended, raylet):
                        os.close(number)
                    return _become_worker(connection, request, streams)
            for stream in streams:
                os.close(stream)
            num_alive += 1


def _reap() -> int:
    """The number of forked processes that have ended since the last call."""
    count = 0
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            count += 1
    return count


def _become_worker(connection: socket.socket, request: bytes, streams: Sequence[int]) -> list[str]:
    """The arguments of this process, which was just forked, after it has taken the streams and variables that were
    sent."""
    # Ray ends a worker together with all processes of its group.
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    connection.send(FORKED)
    # Stays open until this process ends: so `forked_start` knows.
    os.dup(connection.fileno())
    asked = json.loads(request)
    os.environ.update(asked["variables"])
    arguments: list[str] = asked["arguments"]
    return arguments


def _run(arguments: list[str]) -> None:
    """Run the script, as the interpreter does that is started with these arguments."""
    while arguments[0].startswith("-"):
        arguments = arguments[1:]
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")
