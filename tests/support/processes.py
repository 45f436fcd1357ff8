"""Processes that tests start: with the signals of a terminal, and ended with all that they started themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.waiting import PATIENCE_S

_MARK = "TRIDENTSERVE_TEST_PROCESS"
_OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM)


@contextmanager
def started(
    command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None, *, is_heard: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, with pipes of text; one that is not heard prints where the tests do. It ends
    with the block, whatever happens there, and so does everything that it started, in whatever session. For the main
    thread only."""
    mark, pipe = uuid.uuid4().hex, subprocess.PIPE if is_heard else None
    with signals_of_a_terminal():
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**(os.environ if env is None else env), _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            _kill_marked(mark)


def run(
    command: Sequence[str],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    patience_s: float = PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """The output of a process until it ends by itself."""
    with started(command, cwd, env) as process:
        stdout, stderr = process.communicate(timeout=patience_s)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def output_of(command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """The output of a process that ends well."""
    ended = run(command, cwd, env)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@contextmanager
def signals_of_a_terminal() -> Iterator[None]:
    """Processes that are started here have the default handlers. They would inherit what this one ignores, and shells
    ignore SIGINT for what scripts run in the background (`make test &`), `nohup` SIGHUP. For the main thread only."""
    ignored = [number for number in _OF_TERMINALS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:  # A handler is not inherited; this one ignores, too.
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def _kill_marked(mark: str) -> None:
    while pids := _marked(mark):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: str) -> list[int]:
    """The processes that were started with this mark in their environment, or by such a process."""
    found, entry = [], f"{_MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # It has ended, or is someone else's.
            if entry in path.read_bytes():
                found.append(int(path.parent.name))
    return found
