#!/usr/bin/env python3
"""Compares a benchmark of an older commit with that of the working tree: both by turns, on this machine, as ratios.

The older commit is checked out into a temporary git worktree. Each side runs its own BENCH with its own packages, under
this Python. Every other round is backwards, so that neither side always comes first. All figures that both sides print
under the same name in their last line, which is one JSON object, are compared: the ratio is the working tree's over the
older commit's, of one round, so that above 1 means larger now. The last line is one JSON object.

Example: python scripts/compare_commits.py scripts/bench_dispatch.py --base HEAD~10 -- --gpus 128 --ticks 10

Exit status: 0; 1 when a benchmark fails; 2 for bad usage; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from lib.benchmark import describe_run, list_figures, print_result
from lib.command_line import Parser, parse_whole_number

_ROOT = Path(__file__).resolve().parents[1]
_DESCRIBE = ("--always", "--dirty", "--abbrev=40", "--exclude", "*")
# The figures of one round, by side and then by name.
Round = Mapping[str, Mapping[str, float]]


class BenchmarkError(Exception):
    """A benchmark did not end with status 0 and one JSON object."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse_arguments(argv)
    run = describe_run()
    try:
        base, here = (
            _run_git(options, "rev-parse", f"{options.base}^{{commit}}"),
            _run_git(options, "describe", *_DESCRIBE),
        )
        with _open_worktree(options, base) as folder:
            rounds = _run_rounds({"base": folder, "here": options.repository}, options)
    except subprocess.CalledProcessError as error:
        print(f"compare_commits: {' '.join(error.stderr.split())}", file=sys.stderr)
        return 2
    except BenchmarkError as error:
        print(f"compare_commits: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("compare_commits: interrupted", file=sys.stderr)
        return 130
    _print_table(figures := _compare(rounds))
    about = {"benchmark": str(options.bench), "arguments": options.arguments, "rounds": options.rounds}
    print_result(run, about | {"base": base, "here": here, "figures": figures})
    return 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="compare_commits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", type=Path, metavar="BENCH", help="a script by its path in both commits")
    parser.add_argument("--base", required=True, metavar="REV", help="the older commit")
    parser.add_argument(
        "--rounds", type=parse_whole_number, default=3, metavar="N", help="runs of each side (default %(default)s)"
    )
    parser.add_argument(
        "--repository",
        type=Path,
        default=_ROOT,
        metavar="DIR",
        help="the working tree to compare (default: that of this script)",
    )
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.arguments = words[end + 1 :]
    return options


def _run_git(options: argparse.Namespace, *words: str) -> str:
    command = ["git", "-C", str(options.repository), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def _open_worktree(options: argparse.Namespace, commit: str) -> Iterator[Path]:
    """A checkout of a commit, which is gone after the block."""
    with tempfile.TemporaryDirectory(prefix="compare-commits-") as scratch:
        folder = Path(scratch) / "base"
        _run_git(options, "worktree", "add", "--detach", str(folder), commit)
        try:
            yield folder
        finally:
            _run_git(options, "worktree", "remove", "--force", str(folder))


def _run_rounds(sides: Mapping[str, Path], options: argparse.Namespace) -> list[Round]:
    rounds: list[Round] = []
    for number in range(options.rounds):
        order = list(sides)[:: (-1) ** number]
        rounds.append({side: _run_benchmark(side, sides[side], options) for side in order})
        print(f"round {number + 1} of {options.rounds}: {', then '.join(order)}", flush=True)
    return rounds


def _run_benchmark(side: str, root: Path, options: argparse.Namespace) -> dict[str, float]:
    # Before the installed packages, which may be those of either side.
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, str(root / options.bench), *options.arguments]
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        last = (ended.stderr.splitlines() or ["it printed nothing to stderr"])[-1]
        raise BenchmarkError(f"{options.bench} of {side} ended with status {ended.returncode}: {last}")
    try:
        result = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        result = None
    if not isinstance(result, dict):
        raise BenchmarkError(f"the last line of {options.bench} of {side} is no JSON object")
    return {name: figure for name, figure in list_figures(result) if type(figure) in (int, float)}


def _compare(rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """The median of each side and the ratio of the rounds as median, lowest and highest, by figure. Figures that are 0
    on the older side in any round have no ratio, and are left out."""
    figures = {}
    for name in rounds[0]["base"]:
        pairs = [(one["base"].get(name), one["here"].get(name)) for one in rounds]
        known = [(base, here) for base, here in pairs if base and here is not None]
        if len(known) < len(rounds):
            continue
        ratios = [here / base for base, here in known]
        medians = {
            side: median(column) for side, column in zip(("base", "here"), zip(*known, strict=True), strict=True)
        }
        figures[name] = {**medians, "ratio": median(ratios), "ratio_range": [min(ratios), max(ratios)]}
    return figures


def _print_table(figures: Mapping[str, Mapping[str, Any]]) -> None:
    width = max(map(len, figures), default=6)
    print(f"{'figure':{width}} {'base':>12} {'here':>12} {'ratio':>8} {'lowest':>8} {'highest':>8}")
    for name, row in figures.items():
        lowest, highest = row["ratio_range"]
        print(
            f"{name:{width}} {row['base']:12.5g} {row['here']:12.5g} {row['ratio']:8.3f} {lowest:8.3f} {highest:8.3f}"
        )


if __name__ == "__main__":
    sys.exit(main())
