"""The options of `evaluate.py`, and which of them go together."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from dispatch.policies import POLICIES
from lib.command_line import PROFILES, Parser, make_positive, parse_not_negative, parse_policy_name
from lib.evaluate.cells import BASELINES, PAPER_WORKLOADS, NamedLoad
from lib.evaluate.related_systems.offline_sets import add_offline_options
from traces.workloads.named import DIURNAL, DURATION_S, MODELS, WORKLOADS
from traces.workloads.unseen import FIRST_PUBLISHED_SEED
from tridentserve.engine.simulated import SimulationOptions


def add_options(parser: Parser) -> None:
    """Add all options but `--quick`."""
    _add_cells(parser)
    _add_named_load(parser)
    _add_simulation(parser)
    add_offline_options(parser)


def check_options(parser: Parser, arguments: argparse.Namespace) -> None:
    """End the process with status 2 where options are given that do not go together."""
    if arguments.offline:
        if arguments.unseen is not None or arguments.related or arguments.shift or arguments.table:
            parser.error("--offline does not go together with --unseen, --related, --shift and --table")
    elif arguments.mix or arguments.deadlines or (arguments.requests and not arguments.quick):
        parser.error("--mix, --requests and --deadlines are of sets of requests: give --offline")
    elif (arguments.unseen is None) != (arguments.seed is None):
        parser.error("--unseen and --seed go together: cells are drawn from a seed")
    if arguments.related and arguments.unseen is not None:
        parser.error("--related and --unseen do not go together")
    if arguments.unseen is None and (arguments.cells or arguments.deviations):
        parser.error("--cells and --deviations are of unseen cells: give --unseen and --seed")
    if arguments.related and arguments.table:
        parser.error("--table keeps unseen cells and workloads by name: do not give --related")
    changed = NamedLoad(arguments.arrivals, arguments.rate_scale) != NamedLoad()
    other = arguments.related or arguments.shift or arguments.offline or arguments.unseen is not None
    if changed and other:
        parser.error("--arrivals and --rate-scale are of workloads by name alone")
    if arguments.cells and not 0 <= min(arguments.cells) <= max(arguments.cells) < arguments.unseen:
        parser.error(f"--cells are numbers from 0 to {arguments.unseen - 1}, as --unseen is {arguments.unseen}")


def _add_cells(parser: Parser) -> None:
    """The options that say which cells are simulated, and on which cluster."""
    whole = make_positive(int)
    add = parser.add_argument
    add(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="M", help=f"models, of {', '.join(MODELS)}"
    )
    add(
        "--workloads",
        nargs="+",
        choices=list(WORKLOADS),
        default=list(PAPER_WORKLOADS),
        metavar="W",
        help=f"workloads, of {', '.join(WORKLOADS)}; those with a model of their own are run once",
    )
    add(
        "--policies",
        nargs="+",
        type=parse_policy_name,
        default=["default", *BASELINES],
        metavar="P",
        help=f"policies, of {', '.join(POLICIES)}, or dotted paths (docs/write-a-policy.md)",
    )
    add("--gpus", type=whole, default=128, help="GPUs of the cluster (default %(default)s)")
    add("--cluster", metavar="FILE", help="cluster as YAML (deployments/clusters); default: nodes of 8 NVIDIA L20")
    add("--seeds", type=whole, default=1, help="traces per model and workload (default %(default)s)")
    add(
        "--unseen", type=whole, metavar="N", help="N cells whose parameters are all drawn, instead of workloads by name"
    )
    add(
        "--related",
        action="store_true",
        help="the settings of the papers of related systems, with models, workloads, policies, GPUs and deadlines of "
        f"their own; --duration-s scales the length of all ({DURATION_S:g}: as in the papers)",
    )
    add("--shift", action="store_true", help="the default against placements that stay, while the load shifts")
    add("--seed", type=int, help=f"of unseen cells and offline sets; {FIRST_PUBLISHED_SEED} and above are not tuned on")
    add(
        "--cells",
        nargs="+",
        type=int,
        metavar="I",
        help="run the unseen cells with these numbers (from 0, below N) only",
    )
    add(
        "--deviations",
        action="store_true",
        help="of unseen cells: how the default differs from the paper's policy, with each difference alone and without "
        "each, in place of --policies",
    )
    add(
        "--recorded",
        nargs="+",
        metavar="FILE",
        help="published traces (docs/traces.md) whose arrivals unseen cells may have",
    )


def _add_named_load(parser: Parser) -> None:
    """The options that change the arrivals and deadlines of workloads by name."""
    real, add = make_positive(float), parser.add_argument
    add(
        "--slo-scales",
        nargs="+",
        type=real,
        default=[1.0],
        metavar="X",
        help="multiply all deadlines (default: as they are)",
    )
    add(
        "--arrivals",
        choices=("poisson",),
        help=f"arrivals of the workloads, in place of their own, which are even; {DIURNAL} keeps its own",
    )
    add(
        "--rate-scale",
        type=real,
        default=NamedLoad().rate_scale,
        metavar="X",
        help="multiply the rates of the workloads (default %(default)g: as they are)",
    )


def _add_simulation(parser: Parser) -> None:
    """The options that say how the cells are simulated, and where the results go."""
    real, whole = make_positive(float), make_positive(int)
    add = parser.add_argument
    add("--duration-s", type=real, default=DURATION_S, metavar="S", help="seconds of arrivals (default %(default)g)")
    add(
        "--profiles",
        default=PROFILES,
        metavar="DIR",
        help="a shipped table, a CSV file or a directory (default %(default)s)",
    )
    add(
        "--solve-time-s",
        type=parse_not_negative,
        default=SimulationOptions().solve_time,
        metavar="S",
        help="seconds of simulated time that a decision takes (default %(default)s)",
    )
    add(
        "--solve-limit-s",
        type=real,
        metavar="S",
        help="time limit of a solve, in real seconds, not simulated ones (default: that of a service)",
    )
    add("--jobs", type=whole, default=os.cpu_count() or 1, help="processes (default: one per core)")
    add(
        "--out",
        type=Path,
        default=Path("out/evaluation"),
        metavar="DIR",
        help="directory for the results (default %(default)s)",
    )
    add(
        "--table",
        type=Path,
        metavar="FILE",
        help="keep cells in this CSV file, in place of --out: those that it has are not run again",
    )
    add("--bench-dispatch", type=_find_file, metavar="FILE", help="output of scripts/bench_dispatch.py, for the report")
    add("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown too")


def _find_file(text: str) -> Path:
    """The path of a file, which is looked for before the grid, as that may take hours."""
    if not (path := Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path
