"""Property tests with fresh examples, round after round until the time is over: `make fuzz`. The first find ends it."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
_COMMAND = ("-m", "pytest", "-x", "-m", "hypothesis", "--hypothesis-profile=fuzz", "-p", "randomly", "--durations=3")
_FOUND, _INTERRUPTED = 1, 2
_HOW_TO_KEEP = """
fuzz: a property does not hold. Make the find above a fixed example, so that `make test` has it from now on:
  - the arguments after "Falsifying example" become `@example(...)`, on the line under `@given(...)` of that test;
  - where they come from `data.draw` or a state machine, write the steps down as a test of their own.
Then mend the code, or the claim. `.hypothesis/` remembers the find: the next `make fuzz` begins with it.
"""


def run_round(left_s: float) -> int:
    """All property tests once, in a random order; pytest's status. They are interrupted when the time is over."""
    with subprocess.Popen([sys.executable, *_COMMAND], cwd=ROOT, start_new_session=True) as process:
        try:
            return process.wait(timeout=left_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
            return _INTERRUPTED
        finally:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to run, in minutes (default 30)")
    end_s, rounds = time.monotonic() + 60 * parser.parse_args().minutes, 0
    # Where SIGINT is ignored (a script's background job), pytest would inherit that and could not be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while (left_s := end_s - time.monotonic()) > 0:
        rounds += 1
        print(f"fuzz: round {rounds}, {left_s / 60:.1f} minutes left", flush=True)
        try:
            status = run_round(left_s)
        except KeyboardInterrupt:
            return 130
        if status == _FOUND:
            print(_HOW_TO_KEEP, flush=True)
        if status not in (0, _INTERRUPTED):
            return status
    print(f"fuzz: nothing found; {rounds - 1} whole rounds and a part of one", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
