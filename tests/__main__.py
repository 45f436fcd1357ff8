"""All checks, as `make test` and CI run them: lint, types, the tests that start Ray and the others, each with its time.

The tests that start Ray mostly wait for its processes; the others compute. Side by side they take half as long. Two
lanes take the parts one after another, so that a part which begins last is a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITH_RAY = ("tests/engine/live", "tests/e2e")
# Tests that start services of their own, and so can run apart from the others at no cost: the lane that is free first
# has them.
OWN_SERVICES = ("tests/e2e/large_models", "tests/e2e/hub", "tests/e2e/starting")
_NUM_LANES = 2
_COUNTS = re.compile(r"=* ?(\d+ \w+.*|no tests ran) in [\d.]+s")
# Where pytest begins to say what failed, and how many lines of it are repeated at the end.
_FAILURES = re.compile(r"=+ (FAILURES|ERRORS) =+")
_MAX_REPEATED = 150
# The longest line of output, in bytes.
_MAX_LINE = 1 << 26


@dataclass(frozen=True, slots=True)
class Part:
    """Programs of this environment that run one after the other; `label` stands before each line of their output."""

    label: str
    commands: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`counts`: what pytest says at its end, empty for other programs. `failures`: the last lines of what it says of
    tests that failed, which its part of the output may hide among those of the other parts."""

    label: str
    passed: bool
    counts: str
    seconds: float
    failures: tuple[str, ...] = ()

    def line(self) -> str:
        return f"{self.label:8}{'passed' if self.passed else 'FAILED':8}{self.seconds:7.0f} s   {self.counts}".rstrip()


def parts(everything: bool, seed: int | None) -> tuple[Part, list[Part]]:
    """The part that runs first, and those that the lanes take after it. `seed` gives the order of the tests."""
    pytest = (sys.executable, "-m", "pytest", *(("-m", "") if everything else ()))
    if seed is not None:
        pytest += ("-p", "randomly", f"--randomly-seed={seed}")
    lint = Part("lint", (("ruff", "check", "."), ("ruff", "format", "--check", ".")))
    starts = Part("starts", ((*pytest, *OWN_SERVICES),))
    ray = Part("ray", ((*pytest, *WITH_RAY, *(f"--ignore={folder}" for folder in OWN_SERVICES)),))
    pure = Part("pure", ((*pytest, *(f"--ignore={folder}" for folder in WITH_RAY)),))
    return lint, [ray, pure, starts, Part("types", (("mypy",),))]


async def run(part: Part) -> Outcome:
    """Runs the commands until one fails, and prints what they say line by line."""
    began_s, passed, counts = time.monotonic(), True, ""
    failures: deque[str] = deque(maxlen=_MAX_REPEATED)
    for program, *arguments in part.commands:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name(Path(program).name)),
            *arguments,
            cwd=ROOT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_MAX_LINE,
            # Linux shares the cores among sessions first (autogroup): in the shell's own, what else was started there
            # would take most of the time of the lanes.
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            async for raw in process.stdout:
                line = raw.decode(errors="replace").rstrip()
                print(f"{part.label:5}| {line}", flush=True)
                if found := _COUNTS.match(line):
                    counts = found[1]
                if failures or _FAILURES.match(line):
                    failures.append(f"{part.label:5}| {line}")
            passed = await process.wait() == 0
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        if not passed:
            break
    return Outcome(part.label, passed, counts, time.monotonic() - began_s, tuple(failures))


async def run_lane(due: deque[Part]) -> list[Outcome]:
    """Runs the first of the parts that are due, until none is left."""
    outcomes = []
    while due:
        outcomes.append(await run(due.popleft()))
    return outcomes


async def run_all(everything: bool, seed: int | None) -> bool:
    """True when all passed. The other parts are not begun where lint fails, which takes seconds."""
    # SIGTERM, and the end of the terminal unless it is ignored (`nohup`), end the parts too, as Ctrl-C does.
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    began_s = time.monotonic()
    lint, others = parts(everything, seed)
    outcomes = [await run(lint)]
    if outcomes[0].passed:
        due = deque(others)
        for found in await asyncio.gather(*(run_lane(due) for _ in range(_NUM_LANES))):
            outcomes += found
    passed = all(outcome.passed for outcome in outcomes)
    for line in (line for outcome in outcomes for line in ("", *outcome.failures) if outcome.failures):
        print(line)
    print("", *(outcome.line() for outcome in outcomes), sep="\n")
    print(Outcome("all", passed, "", time.monotonic() - began_s).line(), flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    parser.add_argument("--all", action="store_true", help="the slow tests and those of all model families too")
    parser.add_argument("--shuffle", action="store_true", help="run the tests in a random order")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="of that order")
    arguments = parser.parse_args()
    if arguments.shuffle:
        print(f"The tests are shuffled; `make test-random SEED={arguments.seed}` repeats their order.", flush=True)
    try:
        passed = asyncio.run(run_all(arguments.all, arguments.seed if arguments.shuffle else None))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
