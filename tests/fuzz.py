"""Property tests with fresh examples, then random requests to a service with fresh seeds, until the time is over.

`make fuzz` runs it. The first find ends it.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PYTEST = ("-m", "pytest", "-x", "-p", "randomly", "--durations=3")
_REQUESTS = "tests/e2e/test_exactness.py"
# The share of the time that goes to requests, which come last.
_REQUESTS_SHARE = 0.25
_FOUND, _INTERRUPTED = 1, 2
# Within this, an interrupted run has stopped the service that it started.
_STOP_S = 120
_KEEP_EXAMPLE = """
fuzz: a property does not hold. Make the find above a fixed example, so that `make test` has it from now on:
  - the arguments after "Falsifying example" become `@example(...)`, on the line under `@given(...)` of that test;
  - where they come from `data.draw` or a state machine, write the steps down as a test of their own.
Then mend the code, or the claim. `.hypothesis/` remembers the find: the next `make fuzz` begins with it.
"""
_KEEP_REQUEST = f"""
fuzz: a result is not the stock pipeline's. Repeat it with the --requests-seed above, and add the request above,
with its family, to the reported ones of {_REQUESTS}, so that `make test` has it from now on. Then mend the code.
"""


def select_properties() -> tuple[str, ...]:
    """The options of pytest for all property tests, whose examples are fresh in each run."""
    return ("-m", "hypothesis", "--hypothesis-profile=fuzz")


def select_requests() -> tuple[str, ...]:
    """The options of pytest for random requests of all families, with a fresh seed."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"fuzz: requests with --requests-seed={seed}", flush=True)
    return ("-m", "", f"--requests-seed={seed}", _REQUESTS)


def run_round(options: tuple[str, ...], left_s: float) -> int:
    """The tests once, in a random order; pytest's status. They are interrupted when the time is over."""
    with subprocess.Popen([sys.executable, *_PYTEST, *options], cwd=ROOT, start_new_session=True) as process:
        try:
            return process.wait(timeout=left_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_STOP_S)
            return _INTERRUPTED
        finally:
            process.kill()


def run_part(name: str, make_options: Callable[[], tuple[str, ...]], end_s: float) -> int:
    """Rounds of the tests until `end_s` (monotonic); the status of the one that found something, else 0."""
    rounds = 0
    while (left_s := end_s - time.monotonic()) > 0:
        rounds += 1
        print(f"fuzz: {name}, round {rounds}, {left_s / 60:.1f} minutes left", flush=True)
        status = run_round(make_options(), left_s)
        if status not in (0, _INTERRUPTED):
            return status
    print(f"fuzz: nothing found by {name}; {max(rounds - 1, 0)} whole rounds and a part of one", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to run, in minutes (default %(default)g)")
    length_s, began_s = 60 * parser.parse_args().minutes, time.monotonic()
    # Where SIGINT is ignored (a script's background job), pytest would inherit that and could not be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parts = (
        ("property tests", select_properties, 1 - _REQUESTS_SHARE, _KEEP_EXAMPLE),
        ("random requests", select_requests, 1.0, _KEEP_REQUEST),
    )
    for name, make_options, end_share, how_to_keep in parts:
        try:
            status = run_part(name, make_options, began_s + end_share * length_s)
        except KeyboardInterrupt:
            return 130
        if status == _FOUND:
            print(how_to_keep, flush=True)
        if status != 0:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
