"""Tables of an evaluation: every cell, the default over each baseline beside the paper's claims, and the sweeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean, median
from typing import Any

from lib.evaluate.cells import Cell
from lib.evaluate.rows import CellResult

Results = Mapping[Cell, CellResult]
# Model, workload, SLO scale, policy.
Key = tuple[str, str, float, str]
PAPER_WORKLOADS = ("light", "medium", "heavy", "dynamic", "proprietary")
BASELINES = ("b1", "b2", "b3", "b4", "b5", "b6")


@dataclass(frozen=True, slots=True)
class Claim:
    """What the paper states for the default over some baselines: lowest and highest ratio over its cells
    (TridentServe, arXiv 2510.02838, section 8.2)."""

    policies: tuple[str, ...]
    attainment: tuple[float, float]
    mean: tuple[float, float]
    p95: tuple[float, float]


CLAIMS = (
    Claim(("b1",), (2.1, 6.6), (2.4, 6.2), (2.0, 4.8)),
    Claim(("b2", "b3", "b4"), (1.4, 8.3), (1.1, 9.0), (1.2, 6.1)),
    Claim(("b5",), (1.2, 4.6), (1.4, 4.0), (1.2, 4.1)),
    Claim(("b6",), (1.3, 2.5), (1.7, 3.6), (1.5, 4.1)),
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text; `note` says what its figures are."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", *([self.note, ""] if self.note else [])]
        lines.append(f"| {' | '.join(self.header)} |")
        lines.append("|" + "---|" * len(self.header))
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        head = "".join(f"<th>{escape(text)}</th>" for text in self.header)
        rows = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in self.rows)
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f"<h2>{escape(self.title)}</h2>{note}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def means(results: Results) -> dict[Key, dict[str, Any]]:
    """The mean of each figure over the seeds; None where one of them has none. `seeds` is how many there are."""
    grouped: defaultdict[Key, list[dict[str, Any]]] = defaultdict(list)
    for cell, result in results.items():
        grouped[cell.model, cell.workload, cell.slo_scale, cell.policy].append(result.row)
    return {key: _mean_row(rows) for key, rows in grouped.items()}


def _mean_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"seeds": len(rows)}
    for name, first in rows[0].items():
        if first is None or (isinstance(first, int | float) and name not in ("seed", "slo_scale")):
            values = [row[name] for row in rows]
            figures[name] = None if None in values else fmean(values)
    return figures


def cells_table(results: Results) -> Table:
    rows = []
    for (model, workload, slo_scale, policy), row in means(results).items():
        ends = f"{row['failed']:.0f} / {row['ooms']:.0f} / {row['unfinished']:.0f}"
        shares = " / ".join(f"{100 * row[f'v{index}_share']:.0f}" for index in range(4))
        rows.append(
            (
                *(model, workload, f"{slo_scale:g}", policy, f"{row['seeds']}", f"{row['requests']:.0f}"),
                *(_percent(row["slo_attainment"]), _percent(row["bound_attainment"])),
                *(_seconds(row[name]) for name in ("mean_s", "p50_s", "p95_s", "p99_s", "mean_all_s")),
                *(ends, _percent(row["utilisation"]), shares),
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
        "the simulation. SLO scale 1 is the workload's own deadline (2.5 x the latency at the optimal degrees). Bound: "
        "the most that any schedule could finish on time. Failed includes OOM."
    )
    return Table("All cells", header, tuple(rows), note)


def claims_table(results: Results) -> Table:
    """The default over each group of baselines, as lowest, median and highest ratio over the paper's cells."""
    found = {key: row for key, row in means(results).items() if key[1] in PAPER_WORKLOADS and key[2] == 1.0}
    rows = []
    for claim in CLAIMS:
        pairs = [
            (row, found[(*key[:3], "default")], key)
            for key, row in found.items()
            if key[3] in claim.policies and (*key[:3], "default") in found
        ]
        fair = [(base, ours) for base, ours, _ in pairs if not base["ooms"]]
        oom = sorted({key[0] for base, _, key in pairs if base["ooms"]})
        ours_oom = sum(ours["ooms"] > 0 for _, ours, _ in pairs)
        rows.append(
            (
                ", ".join(claim.policies),
                f"{len(fair)}",
                _ratios(_ratio(ours["slo_attainment"], base["slo_attainment"]) for base, ours in fair),
                _claimed(claim.attainment),
                _ratios(_ratio(base["mean_all_s"], ours["mean_all_s"]) for base, ours in fair),
                _claimed(claim.mean),
                _ratios(_ratio(base["p95_all_s"], ours["p95_all_s"]) for base, ours in fair),
                _claimed(claim.p95),
                f"{len(pairs) - len(fair)} ({', '.join(oom)})" if oom else "0",
                f"{ours_oom}",
            )
        )
    header = (
        *("over", "cells", "on-time ratio", "paper", "mean latency ratio", "paper", "P95 ratio", "paper"),
        *("cells where it runs out of memory", "cells where the default does"),
    )
    note = (
        "Above 1 the default is better. Lowest / median / highest over models and workloads, without the cells where "
        "the baseline runs out of memory (they are counted beside). Latencies count all requests; those without a "
        "result until the end of the simulation."
    )
    return Table("The default over each baseline, beside the paper's claims", header, tuple(rows), note)


def ratios_table(results: Results) -> Table:
    """Per model and workload: on-time share of the default over that of each baseline."""
    found = means(results)
    policies = [name for name in sorted({key[3] for key in found}) if name != "default"]
    rows = []
    for model, workload, slo_scale, policy in found:
        if policy != "default" or slo_scale != 1.0:
            continue
        ours = found[model, workload, slo_scale, policy]
        cells = []
        for name in policies:
            base = found.get((model, workload, slo_scale, name))
            ratio = None if base is None else _ratio(ours["slo_attainment"], base["slo_attainment"])
            oom = " OOM" if base is not None and base["ooms"] else ""
            cells.append("-" if base is None else f"{_times(ratio)}{oom}")
        rows.append((model, workload, _percent(ours["slo_attainment"]), _percent(ours["bound_attainment"]), *cells))
    note = "OOM: the other policy lost requests for lack of memory in this cell. ∞: it had none on time."
    header = ("model", "workload", "default on time %", "bound %", *policies)
    return Table("On-time ratio of the default over every other policy", header, tuple(rows), note)


def _ratio(above: float | None, below: float | None) -> float | None:
    """None for x / 0: the other policy had nothing on time; 1 for 0 / 0."""
    if above is None or below is None or (below == 0 and above > 0):
        return None
    return above / below if below else 1.0


def _ratios(ratios: Iterable[float | None]) -> str:
    found = list(ratios)
    known = [ratio for ratio in found if ratio is not None]
    if not known:
        return "∞" if found else "-"
    endless = f" (∞ in {len(found) - len(known)})" if len(known) < len(found) else ""
    return f"{min(known):.2f} / {median(known):.2f} / {max(known):.2f}{endless}"


def _claimed(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]} to {bounds[1]}"


def _times(ratio: float | None) -> str:
    return "∞" if ratio is None else f"{ratio:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
