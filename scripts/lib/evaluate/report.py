"""The report of an evaluation: one HTML file with all plots in it, PNG files, and tables as CSV and Markdown."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping
from html import escape
from pathlib import Path

from lib.evaluate.plots import draw_plots
from lib.evaluate.tables import (
    Results,
    Table,
    compute_means,
    make_cells_table,
    make_claims_table,
    make_frame,
    make_ratios_table,
)
from lib.evaluate.unseen_cells.cell_table import list_unseen_rows
from lib.evaluate.unseen_cells.comparison import compare_unseen
from traces.reports.figures import write_png

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 12.5px; margin: 1rem 0; display: block; overflow-x: auto }
th, td { border: 1px solid #ddd; padding: 3px 7px; text-align: right; white-space: nowrap }
th { background: #f3f4f8; position: sticky; top: 0 } td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left }
tr:nth-child(even) { background: #fafafa }
figure { margin: 2rem 0 } figure img { max-width: 100% } figcaption { color: #555; font-size: 13px }
code { background: #f3f4f8; padding: 1px 4px; overflow-wrap: anywhere }
"""


def make_tables(results: Results) -> list[Table]:
    """The tables that the results have figures for: ratios need the default and something to compare it with. Unseen
    cells are compared in tables of their own."""
    policies = {cell.policy for cell in results}
    if any(cell.is_unseen for cell in results):
        order = sorted(policies, key=lambda policy: (policy != "default", policy))
        return [*compare_unseen(list_unseen_rows(results), order), make_cells_table(results)]
    if "default" not in policies or len(policies) == 1:
        return [make_cells_table(results)]
    return [make_claims_table(compute_means(results)), make_ratios_table(results), make_cells_table(results)]


def write_csv(folder: Path, results: Results) -> Path:
    """Writes `results.csv`; readers never see half of it."""
    draft = folder / "results.csv.part"
    make_frame(results).to_csv(draft, index=False, lineterminator="\n")
    return draft.replace(folder / "results.csv")


def write_markdown(path: Path, results: Results, command: str) -> None:
    """The tables, for a page of the documentation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(table.to_markdown() for table in make_tables(results))
    path.write_text(f"`{command}`\n\n{_describe_options(results)}\n\n{text}", encoding="utf-8")


def _describe_options(results: Results) -> str:
    """The options of the simulated services, and how many decisions hung on the speed of the machine."""
    rows = [result.row for result in results.values()]
    found: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        for name, value in json.loads(row["options"]).items():
            shown = "-" if value is None or value == [] else str(value)
            found.setdefault(name, {}).setdefault(shown, set()).add(row["policy"])
    options = ", ".join(f"{name} {_describe_by_policy(values)}" for name, values in found.items())
    cut_short = sum(row["cut_short"] for row in rows)
    return (
        f"Options of the simulated services, which are those that ship unless the command says otherwise: {options}. "
        f"Solves that hit their time limit made {cut_short} decisions."
    )


def _describe_by_policy(values: Mapping[str, Collection[str]]) -> str:
    """The values of an option, with the policies that have them where policies differ."""
    if len(values) == 1:
        return next(iter(values))
    return " or ".join(f"{value} ({', '.join(sorted(policies))})" for value, policies in values.items())


def write_report(folder: Path, results: Results, command: str, bench: Path | None = None) -> Path:
    """Writes `report.html` and `figures/*.png`; returns the former. Raises `ConfigError` for a `bench` that is no
    output of scripts/bench_dispatch.py."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    shown = []
    named = {cell: result for cell, result in results.items() if not cell.is_unseen}
    for name, caption, figure in draw_plots(named, bench):
        plot = write_png(figure)
        (folder / "figures" / f"{name}.png").write_bytes(plot)
        data = base64.b64encode(plot).decode()
        shown.append(
            f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )
    *compared, cells = (table.to_html() for table in make_tables(results))
    versions = ", ".join(sorted({str(result.row["version"]) for result in results.values()}))
    body = [
        "<h1>TridentServe: evaluation</h1>",
        f"<p>{len(results)} cells, simulated. Version {escape(versions)}. Command: <code>{escape(command)}</code></p>",
        f"<p>{escape(_describe_options(results))}</p>",
        *compared,
        *shown,
        cells,
    ]
    path = folder / "report.html"
    head = f'<meta charset="utf-8"><title>TridentServe: evaluation</title><style>{_STYLE}</style>'
    path.write_text(f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n", "utf-8")
    return path
