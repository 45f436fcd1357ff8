"""Say why a request was late: where, when and as wide as it ran, what it waited for, what would have made it on time.

With the configuration the log is run again: without each cause that is named, with one more worker, at other degrees.
The first of these runs changes nothing, and says how far the others can be trusted.

Examples: python scripts/explain.py decisions.jsonl REQUEST --config deployments/quickstart.yaml
          python scripts/explain.py decisions.jsonl --late 10 --config deployments/quickstart.yaml
Exit status: 0 when all were explained, 2 when the log or the configuration cannot be read or has no such request.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lib.command_line import Parser, make_positive, parse_whole_number
from lib.decision_logs import read_decisions

from deployments.assembly.replay import find_cell
from deployments.config.file import read_args
from deployments.explaining.explain import explain, explain_by_log
from deployments.explaining.rerun import LogRerun
from tridentserve.errors import TridentServeError
from tridentserve.scheduling.explanation.chronicle import Chronicle
from tridentserve.scheduling.explanation.explanation import Explanation, to_plain
from tridentserve.scheduling.explanation.recording import Recording

_LIMIT_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="the file that `decision_log` of the configuration names")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "request", nargs="?", metavar="REQUEST", help="the id of a request, as its client or the log has it"
    )
    asked.add_argument("--late", type=parse_whole_number, metavar="N", help="the N latest requests that were late")
    parser.add_argument(
        "--config",
        type=Path,
        help="the Serve config file that the service ran with; without it the log is not run again",
    )
    parser.add_argument(
        "--limit-s",
        type=make_positive(float),
        default=_LIMIT_S,
        help="begin no further run of the log after so many seconds for one request (default %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print each explanation as one line of JSON")
    options = parser.parse_args(argv)
    try:
        for explanation in _explain(options):
            print(json.dumps(to_plain(explanation)) if options.json else f"{explanation.text}\n")
    except (OSError, TridentServeError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    return 0


def _explain(options: argparse.Namespace) -> Iterator[Explanation]:
    entries = read_decisions(options.log, "explain")
    if options.config is None:
        chronicle = Chronicle(entries)
        for request_id in _choose(options, chronicle):
            yield explain_by_log(chronicle, request_id, "there is no --config to make a scheduler from")
        return
    log = LogRerun(find_cell(read_args(options.config), entries), Recording(entries))
    for request_id in _choose(options, log.chronicle):
        yield explain(log, request_id, options.limit_s)


def _choose(options: argparse.Namespace, chronicle: Chronicle) -> list[str]:
    if options.late is None:
        return [options.request]
    late = [life.request_id for life in chronicle.list_late()]
    if not late:
        raise TridentServeError(f"{options.log}: no request was late")
    return late[-options.late :]


if __name__ == "__main__":
    sys.exit(main())
