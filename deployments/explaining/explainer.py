"""Explains the latest requests of a running service. The log is run again in another process, one at a time."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from deployments.config.app import AppArgs
from tridentserve.engine.live.client_requests import find_request_id
from tridentserve.errors import OverloadedError, RequestNotFoundError, TridentServeError
from tridentserve.scheduling.events import RequestArrived
from tridentserve.scheduling.explanation.recording import Recording

# After so many seconds no further change is tried; and the process ends, whatever it does.
_LIMIT_S = 20.0
_KILL_AFTER_S = 60.0
# Entries that are pickled at once.
_CHUNK = 100
# Most explanations that wait for the one that is being made.
_MAX_WAITING = 4

logger = logging.getLogger(__name__)


class Explainer:
    """The service gives it a copy of its latest decisions, and has nothing else to do with it."""

    def __init__(self, args: AppArgs, record: Callable[[], Awaitable[Recording]]) -> None:
        """`args`: the configuration with which the service (or the cell) began."""
        self._args = args
        self._record = record
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def explain(self, request_id: str) -> dict[str, Any]:
        """The explanation as JSON has it. Raises `RequestNotFoundError`, `OverloadedError` while others wait."""
        recording = await self._record()
        if not _has_request(recording, request_id):
            raise RequestNotFoundError(
                "no request with this id is among the latest that `scheduler.explain_last` keeps"
            )
        if self._waiting >= _MAX_WAITING:
            raise OverloadedError("other explanations are being made, try again later")
        self._waiting += 1
        try:
            async with self._lock:
                return await asyncio.to_thread(_run_child, self._args, recording, request_id)
        finally:
            self._waiting -= 1


def _has_request(recording: Recording, request_id: str) -> bool:
    arrived = (entry.event.spec for entry in recording.entries if isinstance(entry.event, RequestArrived))
    return any(request_id in (spec.request_id, find_request_id(spec.request_id)) for spec in arrived)


def _run_child(args: AppArgs, recording: Recording, request_id: str) -> dict[str, Any]:
    """The last explanation that the process could make: the first is without re-runs."""
    # In small parts: the event loop must come in between.
    entries = recording.entries
    chunks = (entries[start : start + _CHUNK] for start in range(0, len(entries), _CHUNK))
    task = pickle.dumps((args, recording.placement, request_id, _LIMIT_S)) + b"".join(map(pickle.dumps, chunks))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "deployments.explaining.child"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as child:
        try:
            out, err = child.communicate(task, _KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
    answers = [line for line in out.decode().split("\n")[:-1] if line]
    if not answers:
        logger.error("an explanation failed: %s", err.decode(errors="replace")[-2000:])
        raise TridentServeError("the explanation failed; the log of the service says why")
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer
