"""Replay a decision log through the scheduler and show where it decides differently now.

The reasons of decisions are sentences for people, which a later version may word otherwise: they are not compared.

Example: python scripts/replay_decisions.py decisions.jsonl --config deployments/quickstart.yaml
Exit status: 0 when all decisions are the same, 1 when some differ, 2 when the log or the configuration cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lib.command_line import Parser
from lib.decision_logs import read_decisions

from deployments.assembly.replay import replay_log
from deployments.config.app import AppArgs
from deployments.config.file import read_args
from tridentserve.errors import TridentServeError
from tridentserve.scheduling.decision_log import LogEntry
from tridentserve.scheduling.events import Effect

_SHOWN = 10


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="the file that `decision_log` of the configuration names")
    parser.add_argument("--config", type=Path, required=True, help="the Serve config file that the service ran with")
    options = parser.parse_args(argv)
    try:
        return _compare(read_args(options.config), read_decisions(options.log, "replay_decisions"))
    except (OSError, TridentServeError) as error:
        print(f"replay_decisions: {error}", file=sys.stderr)
        return 2


def _compare(args: AppArgs, decisions: list[LogEntry]) -> int:
    differing = 0
    for number, (decision, effects) in enumerate(replay_log(args, decisions), start=1):
        if _leave_out_reasons(decision.effects) == _leave_out_reasons(effects):
            continue
        differing += 1
        if differing <= _SHOWN:
            print(f"line {number}, {decision.now_s:.3f} s, {decision.event.kind}:")
            print(f"  logged: {decision.effects}\n  now:    {effects}")
    print(f"{len(decisions)} decisions, {differing} differ")
    return 1 if differing else 0


def _leave_out_reasons(effects: Sequence[Effect]) -> list[Effect]:
    return [replace(effect, reason="") for effect in effects]


if __name__ == "__main__":
    sys.exit(main())
