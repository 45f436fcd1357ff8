"""The starter of the tests' processes: signals as from a terminal, and nothing left behind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.support.processes import _marked, run, started
from tests.support.waiting import wait_until

SIGNALS = "import signal; print(*(int(signal.getsignal(n) is not signal.SIG_IGN) for n in (2, 1, 15)))"
# It starts a process in another session, tells that it has, and waits.
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print("started", flush=True)
time.sleep(1000)
"""


def test_processes_have_the_signals_of_a_terminal_whoever_started_the_tests() -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        assert run([sys.executable, "-c", SIGNALS]).stdout.split() == ["1", "1", "1"]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with started([sys.executable, "-c", "import time; print('here', flush=True); time.sleep(1000)"]) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate()
        assert "KeyboardInterrupt" in stderr
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_what_a_process_started_ends_with_it_whatever_happens() -> None:
    marks = list[str]()

    def fail() -> None:
        with started([sys.executable, "-c", PARENT]) as process:
            assert process.stdout is not None
            process.stdout.readline()
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
            marks.extend(entry.partition("=")[2] for entry in environment if "TEST_PROCESS=" in entry)
            wait_until(lambda: len(_marked(marks[0])) == 2, "both run")
            raise KeyError("the test fails")

    with pytest.raises(KeyError, match="the test fails"):
        fail()
    assert len(marks) == 1
    assert _marked(marks[0]) == []
