#!/usr/bin/env python3
"""Compares policies on workloads: simulates a grid of cells and reports on it.

A cell is a model, a workload, a policy, a seed and an SLO scale; all policies of a model, workload and seed serve the
same trace with the same deadlines. Finished cells are kept in DIR (results.csv, cells.jsonl), and a rerun skips them.
The report (report.html, figures/) is of all cells in DIR. The last line is one JSON object, of the cells asked for.
With --shift, no grid: the load shifts, and the default is compared with placements that stay; nothing is kept in DIR.
With --offline, no grid either: sets of requests are all there at time zero; what counts is when all are done.
With --table, cells are kept in that CSV file in place of DIR; of unseen cells, two plots are drawn beside it (not with
--deviations).

Exit status: 0 when all cells are there, 1 when any failed, 2 for bad usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lib.benchmark import describe_run, print_result
from lib.command_line import PROFILES, Parser, make_positive, parse_not_negative, parse_policy_name
from lib.evaluate.cells import BASELINES, PAPER_WORKLOADS, Cell, NamedLoad, Settings, list_cells, list_unseen_cells
from lib.evaluate.missing_cells import run_missing
from lib.evaluate.related_systems.offline_sets import OfflineQuestion, add_offline_options
from lib.evaluate.related_systems.settings import list_related_cells
from lib.evaluate.store import Store

from deployments.assembly.options import format_options
from dispatch.policies import POLICIES
from traces.workloads.named import DIURNAL, DURATION_S, MODELS, WORKLOADS
from traces.workloads.unseen import FIRST_PUBLISHED_SEED
from tridentserve.engine.simulated import SimulationOptions
from tridentserve.errors import TridentServeError


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    # Imported here: help and the processes that simulate need no pandas and no matplotlib.
    from lib.evaluate.related_systems.comparison import make_related_table, write_related
    from lib.evaluate.report import write_csv, write_markdown, write_report
    from lib.evaluate.scenes import read_recorded
    from lib.evaluate.tables import summarize
    from lib.evaluate.unseen_cells.cell_table import list_unseen_rows
    from lib.evaluate.unseen_cells.comparison import compare_unseen
    from lib.evaluate.unseen_cells.deviations import DEVIATION_POLICIES, make_deviations_table

    if arguments.deviations:
        arguments.policies = list(DEVIATION_POLICIES)
    command = " ".join(["python scripts/evaluate.py", *map(shlex.quote, sys.argv[1:] if argv is None else argv)])
    settings = Settings(
        arguments.gpus,
        arguments.duration_s,
        arguments.profiles,
        arguments.cluster,
        arguments.solve_time_s,
        arguments.solve_limit_s,
        arguments.recorded and tuple(arguments.recorded),
        NamedLoad(arguments.arrivals, arguments.rate_scale),
    )
    try:
        settings.read_cluster_spec()
        if settings.recorded:
            read_recorded(settings.recorded)  # refused here, not once for each cell
        if arguments.shift:
            return _compare_shifts(arguments, settings, command)
        if arguments.offline:
            return _compare_offline(arguments, settings, command)
        if arguments.table is not None:
            return _extend_table(arguments, settings, command)
        store = Store(arguments.out, settings)
        if arguments.markdown is not None:
            arguments.markdown.parent.mkdir(parents=True, exist_ok=True)  # the grid may take hours
        cells = list(_list_cells(arguments, settings))
        run = describe_run(command=command)
        status = run_missing(cells, settings, store, arguments.jobs, command)
        if not store.results:
            print("evaluate: no cell has a result: there is nothing to report", file=sys.stderr)
            return status
        print(format_options(settings.make_options()))
        print(f"results: {write_csv(arguments.out, store.results)}")
        print(f"report: {write_report(arguments.out, store.results, command, arguments.bench_dispatch)}")
        if arguments.markdown is not None:
            write_markdown(arguments.markdown, store.results, command)
            print(f"tables: {arguments.markdown}")
        asked = {cell: result for cell, result in store.results.items() if cell in cells}
        figures = {"cells": len(cells), "finished": len(asked)}
        if arguments.unseen is None and not arguments.related:
            print_result(run, {**figures, "rows": summarize(asked, arguments.policies)})
        else:
            if arguments.related:
                tables = [make_related_table(asked)]
                print(f"related systems: {write_related(arguments.out, tables[0])}")
            elif arguments.deviations:
                tables = [make_deviations_table(list_unseen_rows(asked))]
            else:
                tables = compare_unseen(list_unseen_rows(asked), arguments.policies)
            print("\n".join(table.to_markdown() for table in tables))
            print_result(run, {**figures, "rows": [row for table in tables for row in table.to_records()]})
    except (TridentServeError, OSError) as error:
        print(f"evaluate: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return status


def _list_cells(arguments: argparse.Namespace, settings: Settings) -> Iterator[Cell]:
    if arguments.related:
        return list_related_cells(arguments.seeds)
    if arguments.unseen is not None:
        indices = arguments.cells or range(arguments.unseen)
        return list_unseen_cells(arguments.seed, indices, arguments.policies, settings)
    return list_cells(arguments.models, arguments.workloads, arguments.policies, arguments.seeds, arguments.slo_scales)


def _compare_shifts(arguments: argparse.Namespace, settings: Settings, command: str) -> int:
    """Prints each table as soon as it is there. Returns the exit status."""
    from lib.evaluate.shift import compare_shifts

    run, rows = describe_run(command=command), []
    for table in compare_shifts(arguments.models, arguments.seeds, settings):
        print(table.to_markdown(), flush=True)
        rows += [{"shift": table.title, **row} for row in table.to_records()]
    print_result(run, {"rows": rows})
    return 0


def _compare_offline(arguments: argparse.Namespace, settings: Settings, command: str) -> int:
    """Returns the exit status."""
    from lib.evaluate.related_systems.offline_table import list_set_rows, make_offline_table, serve_sets

    question = OfflineQuestion(arguments.mix, arguments.requests, arguments.deadlines)
    cells = list(question.list_cells(arguments.seed, arguments.seeds, arguments.policies))
    run = describe_run(command=command)
    try:
        results = serve_sets(question, cells, settings, arguments.jobs)
    except KeyboardInterrupt:
        print("evaluate: interrupted; nothing is kept of this run", file=sys.stderr)
        return 130
    title = f"{cells[0].workload}: {question.num_requests} requests on {settings.gpus} GPUs, seed {arguments.seed}"
    rows = list_set_rows(results)
    print(format_options(settings.make_options()))
    print(make_offline_table(rows, arguments.policies, title).to_markdown())
    print_result(run, {"cells": len(cells), "finished": len(results), "rows": rows})
    return 0 if len(results) == len(cells) else 1


def _extend_table(arguments: argparse.Namespace, settings: Settings, command: str) -> int:
    """Runs the cells that the table does not have, and compares the policies in all cells of the table. Returns the
    exit status."""
    from lib.evaluate.kept_table import KeptTable
    from lib.evaluate.named_cells import NamedRow, compare_named
    from lib.evaluate.unseen_cells.cell_plots import write_unseen_plots
    from lib.evaluate.unseen_cells.cell_table import UnseenRow, check_cells
    from lib.evaluate.unseen_cells.comparison import compare_unseen
    from lib.evaluate.unseen_cells.deviations import make_deviations_table

    arguments.table.parent.mkdir(parents=True, exist_ok=True)
    cells, run = list(_list_cells(arguments, settings)), describe_run(command=command)
    if arguments.unseen is not None:
        unseen = KeptTable(arguments.table, UnseenRow, settings)
        check_cells(unseen, cells, settings)
        status = run_missing(cells, settings, unseen, arguments.jobs, command)
        finished = sum(cell in unseen for cell in cells)
        if arguments.deviations:
            tables = [make_deviations_table(unseen.rows)]
        else:
            tables = compare_unseen(unseen.rows, arguments.policies)
            for path in write_unseen_plots(unseen.path, unseen.rows, arguments.policies):
                print(f"plot: {path}")
    else:
        named = KeptTable(arguments.table, NamedRow, settings)
        status = run_missing(cells, settings, named, arguments.jobs, command)
        tables, finished = list(compare_named(named.rows)), sum(cell in named for cell in cells)
    print(format_options(settings.make_options()))
    print("\n".join(one.to_markdown() for one in tables))
    rows = [row for one in tables for row in one.to_records()]
    print_result(run, {"cells": len(cells), "finished": finished, "rows": rows})
    return status


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_cells(parser)
    _add_named_load(parser)
    _add_simulation(parser)
    add_offline_options(parser)
    parser.add_quick(
        models=["sd3-medium"],
        workloads=["light"],
        policies=["default", "b3"],
        gpus=8,
        duration_s=30.0,
        requests=8,
        jobs=1,
    )
    arguments = parser.parse_args(argv)
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
    return arguments


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


if __name__ == "__main__":
    sys.exit(main())
