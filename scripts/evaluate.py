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
import shlex
import sys
from collections.abc import Iterator, Sequence

from lib.benchmark import describe_run, print_result
from lib.command_line import Parser
from lib.evaluate.cells import Cell, NamedLoad, Settings, list_cells, list_unseen_cells
from lib.evaluate.kept.store import Store
from lib.evaluate.missing_cells import run_missing
from lib.evaluate.options import add_options, check_options
from lib.evaluate.related_systems.offline_sets import OfflineQuestion
from lib.evaluate.related_systems.settings import list_related_cells

from deployments.assembly.options import format_options
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
    from lib.evaluate.kept.kept_table import KeptTable
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
    add_options(parser)
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
    check_options(parser, arguments)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
