"""Tables of an evaluation: means and ratios of each policy, every cell, and the default beside the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import Any

import pandas as pd

from dispatch.options import DEFAULT_POLICY
from lib.evaluate.cells import PAPER_WORKLOADS, Cell
from lib.evaluate.rows import COLUMNS, CellResult
from tridentserve.scheduling.estimation.expected_times import DEFAULT_SLO_SCALE

Results = Mapping[Cell, CellResult]
# The columns that policies are compared within.
SETTING = ["model", "workload", "slo_scale"]


@dataclass(frozen=True, slots=True)
class Claim:
    """The paper's claim for the default over some baselines: lowest and highest ratio over its cells (TridentServe,
    arXiv 2510.02838, section 8.2)."""

    policies: tuple[str, ...]
    attainment: tuple[float, float]
    mean: tuple[float, float]
    p95: tuple[float, float]


CLAIMS = (
    Claim(("b1",), (2.1, 6.6), (2.4, 6.2), (2.0, 4.8)),
    Claim(("b2", "b3", "b4"), (1.4, 8.3), (1.1, 9.0), (1.2, 6.1)),
    Claim(("b5",), (1.2, 4.6), (1.4, 4.0), (1.2, 4.1)),
    Claim(("b6",), (1.3, 2.5), (1.7, 3.6), (1.5, 4.1)),
    # B6 as the paper describes it.
    Claim(("b6-planned",), (1.3, 2.5), (1.7, 3.6), (1.5, 4.1)),
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text; `note` says what its figures are."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def to_markdown(self, level: int = 2) -> str:
        """`level`: that of the heading."""
        lines = [f"{'#' * level} {self.title}", "", *([self.note, ""] if self.note else [])]
        lines.append(f"| {' | '.join(self.header)} |")
        lines.append("|" + "---|" * len(self.header))
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def to_records(self) -> list[dict[str, str]]:
        """One dictionary for each row."""
        return [dict(zip(self.header, row, strict=True)) for row in self.rows]

    def to_html(self) -> str:
        head = "".join(f"<th>{escape(text)}</th>" for text in self.header)
        rows = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in self.rows)
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f"<h2>{escape(self.title)}</h2>{note}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def make_frame(results: Results) -> pd.DataFrame:
    """One row for each cell, with the columns of results.csv; NaN for a figure that is None."""
    rows = pd.DataFrame([result.row for result in results.values()], columns=list(COLUMNS))
    # A column of None alone would not be of numbers.
    return rows.fillna(math.nan).infer_objects()


def compute_means(results: Results) -> pd.DataFrame:
    """One row for each setting and policy: the mean of each figure over the seeds, NaN where one of them has none.
    `seeds` is how many there are."""
    return average_seeds(
        make_frame(results).drop(columns=["seed", "index", "parameters", "options", "version", "command"])
    )


def average_seeds(rows: pd.DataFrame) -> pd.DataFrame:
    """`compute_means` of rows with the columns of a setting, the policy, and figures."""
    grouped = rows.groupby([*SETTING, "policy"], sort=False)
    # Unlike pandas' own mean, fmean rounds only once.
    return grouped.agg(fmean).assign(seeds=grouped.size()).reset_index()


def _join_ours(found: pd.DataFrame, ours: str = DEFAULT_POLICY) -> pd.DataFrame:
    """Rows of means with the figures of one policy in the same setting, as columns that end in `_ours`."""
    return found.merge(found[found["policy"] == ours], on=SETTING, suffixes=("", "_ours"))


def summarize(results: Results, policies: Sequence[str]) -> list[dict[Hashable, Any]]:
    """Means over the seeds, in the order of `policies`, NaN where a seed has no such figure. Ratios are to the first of
    the policies in the same setting, NaN where it has no such figure, infinite or NaN where the figure is 0."""
    found = compute_means(results)
    asked = found[SETTING].drop_duplicates().merge(pd.DataFrame({"policy": policies}), how="cross")
    first = found[found["policy"] == policies[0]]
    rows = asked.merge(found).merge(first, on=SETTING, how="left", suffixes=("", "_first"))
    for name in ("slo_attainment", "mean_s"):
        rows[f"{name}_ratio"] = rows[name] / rows[f"{name}_first"]
    figures = ["slo_attainment", "bound_attainment", "mean_s", "p95_s", "slo_attainment_ratio", "mean_s_ratio"]
    return rows[[*SETTING, "policy", *figures]].to_dict("records")


def make_cells_table(results: Results) -> Table:
    rows = []
    for row in compute_means(results).to_dict("records"):
        ends = f"{row['failed']:.0f} / {row['ooms']:.0f} / {row['unfinished']:.0f}"
        shares = " / ".join(f"{100 * row[f'v{index}_share']:.0f}" for index in range(4))
        rows.append(
            (
                *(row["model"], row["workload"], f"{row['slo_scale']:g}", row["policy"]),
                *(f"{row['seeds']}", f"{row['requests']:.0f}"),
                *(_format_percent(row["slo_attainment"]), _format_percent(row["bound_attainment"])),
                *(_format_seconds(row[name]) for name in ("mean_s", "p50_s", "p95_s", "p99_s", "mean_all_s")),
                *(ends, _format_percent(row["utilisation"]), shares),
                *(f"{row['placement_switches']:.0f}", f"{row['moved_bytes'] / 1e9:.0f}"),
            )
        )
    header = (
        *("model", "workload", "SLO scale", "policy", "seeds", "requests", "on time %", "bound %"),
        *("mean s", "P50 s", "P95 s", "P99 s", "mean of all s", "failed / OOM / unfinished", "busy %"),
        *("V0 / V1 / V2 / V3 %", "switches", "moved GB"),
    )
    note = (
        "Latencies are of completed requests; in the mean of all, a request without a result counts until the end of "
        f"the simulation. SLO scale 1 is the workload's own deadline ({DEFAULT_SLO_SCALE:g} x the latency at the "
        "optimal degrees). Bound: the most that any schedule could finish on time. Failed includes OOM."
    )
    return Table("All cells", header, tuple(rows), note)


def make_claims_table(found: pd.DataFrame, ours: str = DEFAULT_POLICY, title: str = "") -> Table:
    """One policy over each group of baselines, as lowest, median and highest ratio over the paper's cells. `found`:
    means over the seeds."""
    pairs = _join_ours(found[found["workload"].isin(PAPER_WORKLOADS) & (found["slo_scale"] == 1.0)], ours)
    rows = []
    for claim in CLAIMS:
        over = pairs[pairs["policy"].isin(claim.policies)]
        if over.empty:
            continue
        fair, oom = over[over["ooms"] == 0], over[over["ooms"] > 0]
        rows.append(
            (
                ", ".join(name for name in claim.policies if name in set(over["policy"])),
                f"{len(fair)}",
                _format_ratios(_divide(fair["slo_attainment_ours"], fair["slo_attainment"])),
                _format_claimed(claim.attainment),
                _format_ratios(_divide(fair["mean_all_s"], fair["mean_all_s_ours"])),
                _format_claimed(claim.mean),
                _format_ratios(_divide(fair["p95_all_s"], fair["p95_all_s_ours"])),
                _format_claimed(claim.p95),
                f"{len(oom)} ({', '.join(sorted(set(oom['model'])))})" if len(oom) else "0",
                f"{(over['ooms_ours'] > 0).sum()}",
            )
        )
    header = (
        *("over", "cells", "on-time ratio", "in the paper", "mean latency ratio", "mean in the paper", "P95 ratio"),
        "P95 in the paper",
        *("cells where it runs out of memory", f"cells where {ours} does"),
    )
    note = (
        f"Above 1 `{ours}` is better. Lowest / median / highest over models and workloads, without the cells where "
        "the baseline runs out of memory (they are counted beside). Latencies count all requests; those without a "
        "result until the end of the simulation."
    )
    return Table(title or f"{ours} over each baseline, beside the paper's claims", header, tuple(rows), note)


def make_ratios_table(results: Results) -> Table:
    """The on-time share of the default over that of each baseline, by model and workload."""
    found = compute_means(results)
    policies = sorted(set(found["policy"]) - {"default"})
    pairs = _join_ours(found[found["slo_scale"] == 1.0])
    ratios = _divide(pairs["slo_attainment_ours"], pairs["slo_attainment"])
    pairs["ratio"] = ratios.map(_format_ratio) + pairs["ooms"].map(lambda ooms: " OOM" if ooms else "")
    ours = ["model", "workload", "slo_attainment_ours", "bound_attainment_ours"]
    wide = pairs.pivot(index=ours, columns="policy", values="ratio").reindex(columns=policies).fillna("-")
    rows = [
        (model, workload, _format_percent(on_time), _format_percent(bound), *ratios)
        for (model, workload, on_time, bound), *ratios in wide.itertuples()
    ]
    note = "OOM: the other policy lost requests for lack of memory in this cell. ∞: it had none on time."
    header = ("model", "workload", "default on time %", "bound %", *policies)
    return Table("On-time ratio of the default over every other policy", header, tuple(rows), note)


def _divide(above: pd.Series[float], below: pd.Series[float]) -> pd.Series[float]:
    """The quotient; infinite for x / 0, as the other policy had nothing on time, and 1 for 0 / 0."""
    return (above / below).where(above != below, 1.0)


def _format_ratios(ratios: pd.Series[float]) -> str:
    known = ratios[ratios < math.inf]
    if known.empty:
        return "-" if ratios.empty else "∞"
    endless = f" (∞ in {len(ratios) - len(known)})" if len(known) < len(ratios) else ""
    return f"{known.min():.2f} / {known.median():.2f} / {known.max():.2f}{endless}"


def _format_claimed(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]} to {bounds[1]}"


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < math.inf else "∞"


def _format_percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _format_seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
