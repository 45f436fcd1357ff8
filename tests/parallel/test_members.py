"""The processes of the pool and of the profiler: signals as from a terminal, and none outlives the one that made it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.parallel.members import Member
from tests.support.processes import started
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
POOL = """
import signal, time
from tests.parallel import test_members
from tests.parallel.members import Pool

signal.signal(signal.SIGINT, signal.SIG_IGN)
pool = Pool(1)
(answer,) = pool.run(test_members.describe, 1)
pool.post(test_members.sleep_long, 1)
print(*answer, flush=True)
time.sleep(1000)
"""
PROFILER = """
import time
from pathlib import Path
from profiler.measure.processes import Processes
from profiler.measure.stages import Source
from tests.parallel import test_members

processes = Processes(Source(Path(), "cpu"), max_degree=2, repeats=1, num_threads=1)
rank = processes._ranks[0]
answer = rank.submit(test_members.describe).result()
rank.submit(time.sleep, 1000)
print(*answer, flush=True)
time.sleep(1000)
"""


def describe(member: Member | None = None) -> tuple[int, bool]:
    """The process that runs this, and True when Ctrl-C interrupts it."""
    return os.getpid(), signal.getsignal(signal.SIGINT) is signal.default_int_handler


def sleep_long(member: Member) -> None:
    time.sleep(1000)


def is_running(pid: int) -> bool:
    """False for a process that has ended, also where nobody has asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() != b""
    except OSError:
        return False


@pytest.mark.parametrize("script", [POOL, pytest.param(PROFILER, marks=pytest.mark.slow)], ids=["pool", "profiler"])
def test_a_member_ends_when_the_process_that_started_it_is_killed(script: str) -> None:
    with started([sys.executable, "-c", script], ROOT, os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        assert process.stdout is not None
        pid, interruptible = process.stdout.readline().split()
        assert interruptible == "True"
        assert is_running(int(pid))
        process.kill()
        wait_until(lambda: not is_running(int(pid)), "the member has ended")
