"""Runs checks one after another, each in a process of its own, and keeps what each has found on disk at once.

A later run with the same directory goes on where the one before had to stop.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RESULTS = "gpu-check.json"
_LEAST_S = 20.0
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Check:
    """One check."""

    stage: str
    name: str
    command: tuple[str, ...]
    read: Callable[[str], dict[str, Any]]
    """Makes figures of what the command has printed."""
    good: tuple[int, ...] = (0,)
    """The exit statuses of a check that has been done."""
    need_bytes: int = 0
    """Memory of the GPU that its tensors are expected to take; 0 where that is not known."""


def read_last_line(output: str) -> dict[str, Any]:
    """The JSON object that a benchmark ends with."""
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


class CheckRunner:
    """The checks of one directory."""

    def __init__(self, folder: Path, limit_s: float, memory_bytes: int | None = None) -> None:
        """`memory_bytes` are those that the GPU has for tensors; None: as many as any check needs."""
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._end_s = time.monotonic() + limit_s
        self._path = folder / _RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def run(self, jobs: Iterable[Check]) -> list[str]:
        """Run what is not done yet, as far as the time goes: what has failed before comes last, and what needs more
        memory than the GPU has is skipped. Returns the names of what is left."""
        left = []
        for job in sorted(jobs, key=lambda job: self._get_status(job) == "failed"):
            if self._get_status(job) == "done" or self._skip(job):
                continue
            remaining_s = self._end_s - time.monotonic()
            if remaining_s < _LEAST_S:
                left.append(job.name)
                continue
            result = self._run(job, remaining_s)
            self._keep(job, result, f"{result['status']}, {result['seconds']:.0f} s")
            if result["status"] == "cut short":
                left.append(job.name)
        return left

    def list_names(self, jobs: Iterable[Check], status: str) -> list[str]:
        """The names of those of these checks with a status: `done`, `skipped`, `failed` or `cut short`."""
        return [job.name for job in jobs if self._get_status(job) == status]

    def _get_status(self, job: Check) -> str | None:
        status: str | None = self.results.get(job.name, {}).get("status")
        return status

    def _skip(self, job: Check) -> bool:
        if self._memory_bytes is None or job.need_bytes <= self._memory_bytes:
            return False
        reason = f"needs {job.need_bytes / 1e9:.1f} GB, this GPU has {self._memory_bytes / 1e9:.1f} GB for tensors"
        self._keep(job, {"stage": job.stage, "status": "skipped", "reason": reason}, f"skipped: {reason}")
        return True

    def _keep(self, job: Check, result: dict[str, Any], said: str) -> None:
        self.results[job.name] = result
        self._path.write_text(json.dumps(self.results, indent=1))
        print(f"{job.name}: {said}", flush=True)

    def _run(self, job: Check, limit_s: float) -> dict[str, Any]:
        begin_s = time.monotonic()
        output, status = _call(job.command, limit_s)
        log = self._folder / f"{job.name.replace(' ', '-').replace('/', '-')}.log"
        log.write_text(output)
        result: dict[str, Any] = {"stage": job.stage, "seconds": round(time.monotonic() - begin_s, 1)}
        if status is None:
            return result | {"status": "cut short"}
        try:
            figures = job.read(output)
        except (ValueError, IndexError, OSError):
            figures = {"last_lines": output.strip().splitlines()[-3:]}
        return result | {"status": "done" if status in job.good else "failed", "exit": status, "figures": figures}


def _call(command: Sequence[str], limit_s: float) -> tuple[str, int | None]:
    """The output of a command, and its exit status; None for one that took too long and was ended, with all that it
    started."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
            return output, process.returncode
        except subprocess.TimeoutExpired:
            for number in (signal.SIGTERM, signal.SIGKILL):
                os.killpg(process.pid, number)
                try:
                    output, _ = process.communicate(timeout=_END_S)
                    break
                except subprocess.TimeoutExpired:
                    output = ""
            return output, None
