"""The table of related systems: the figures of their papers beside ours."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from lib.evaluate.related_systems.fixed_degrees import FIXED_DEGREES
from lib.evaluate.related_systems.settings import RELATED, RelatedSetting
from lib.evaluate.rows import CellResult
from lib.evaluate.tables import Results, Table

# The share on time at which PatchedServe's paper compares rates (section 8.1).
_GOOD = 0.9
# The talk has the FCFS baseline's images wait for 15.9 s; of the fixed degrees, those of this one wait about as long.
_TALK_FCFS = FIXED_DEGREES[2]


class _SettingResults:
    """The results of one setting; figures are means over its seeds."""

    def __init__(self, setting: RelatedSetting, results: Results) -> None:
        self.setting = setting
        self._found: dict[tuple[str, float, int], list[CellResult]] = {}
        for cell, result in results.items():
            if cell.workload == setting.name:
                self._found.setdefault((cell.policy, cell.slo_scale, cell.index), []).append(result)

    @property
    def num_seeds(self) -> int:
        """0 where some policy has no result yet."""
        wanted = [
            (policy, slo_scale, index)
            for policy in self.setting.policies
            for slo_scale in self.setting.slo_scales
            for index in range(len(self.setting.rate_scales))
        ]
        return min(len(self._found.get(key, ())) for key in wanted)

    def average(self, policy: str, slo_scale: float, index: int, read: Callable[[CellResult], Any]) -> float:
        """The mean of a figure; NaN where a run has none."""
        values = [read(result) for result in self._found[policy, slo_scale, index]]
        return fmean(float("nan") if value is None else value for value in values)

    def on_time(self, policy: str, slo_scale: float = 1.0, index: int = 0) -> float:
        """The share of requests on time."""
        return self.average(policy, slo_scale, index, lambda result: result.row["slo_attainment"])

    def best_fixed(self, slo_scale: float) -> float:
        """The largest share on time of a fixed degree."""
        return max(self.on_time(policy, slo_scale) for policy in self.setting.baselines)


Measure = Callable[[_SettingResults, str], str]


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A figure of a paper."""

    setting: str
    """The name of the setting."""
    what: str
    paper: str
    source: str
    """The section, table or figure of the paper."""
    measure: Measure
    """Ours, for the policy of this name."""
    about_baseline: bool = False
    """The figure is the baseline's, and no policy stands in for the system."""


def _lead_at(*slo_scales: float) -> Measure:
    def measure(found: _SettingResults, policy: str) -> str:
        scales = slo_scales or found.setting.slo_scales
        return f"{fmean(found.on_time(policy, scale) - found.best_fixed(scale) for scale in scales):+.3f}"

    return measure


def _read_model(model: str, figure: str) -> Callable[[CellResult], Any]:
    return lambda result: result.details["models"][model][figure]


def _split_by_model(slo_scale: float, baseline: str | None = None) -> Measure:
    def measure(found: _SettingResults, policy: str) -> str:
        name = baseline or policy
        reads = [_read_model(model, "slo_attainment") for model in ("sd3-medium", "cogvideox1.5-5b")]
        parts = [found.on_time(name, slo_scale), *(found.average(name, slo_scale, 0, read) for read in reads)]
        return " / ".join(f"{part:.2f}" for part in parts)

    return measure


def _image_wait(baseline: str | None = None) -> Measure:
    def measure(found: _SettingResults, policy: str) -> str:
        return f"{found.average(baseline or policy, 1.0, 0, _read_model('sd3-medium', 'wait_s')):.2f} s"

    return measure


def _latency_ratio(read: Callable[[CellResult], Any]) -> Measure:
    def measure(found: _SettingResults, policy: str) -> str:
        (naive,) = found.setting.baselines
        indices = range(len(found.setting.rate_scales))
        ratios = [found.average(naive, 1.0, i, read) / found.average(policy, 1.0, i, read) for i in indices]
        return " / ".join(f"{ratio:.2f}" for ratio in ratios)

    return measure


def _mean_lead(found: _SettingResults, policy: str) -> str:
    fcfs = found.setting.baselines[0]
    leads = [
        found.on_time(policy, index=i) - found.on_time(fcfs, index=i) for i in range(len(found.setting.rate_scales))
    ]
    return f"{fmean(leads):+.3f}"


def _rate_ratio(found: _SettingResults, policy: str) -> str:
    fcfs = found.setting.baselines[0]
    rates = found.setting.rate_scales
    ours, theirs = (
        find_good_rate(rates, [found.on_time(name, index=i) for i in range(len(rates))]) for name in (policy, fcfs)
    )
    return "-" if ours is None or theirs is None else f"{ours / theirs:.2f}"


def find_good_rate(rates: Sequence[float], on_time: Sequence[float]) -> float | None:
    """The rate up to which 90 % are on time, between two rates by a straight line; None where all are beyond it, or
    none is."""
    points = list(zip(rates, on_time, strict=True))
    for (low, before), (high, after) in pairwise(points):
        if before >= _GOOD > after:
            return low + (high - low) * (before - _GOOD) / (before - after)
    return None


_UNIFORM, _SKEWED, _GENSERVE, _DIT, _PATCHED = RELATED
_LEAD = "on time, less the best fixed degree's"
FIGURES = (
    PaperFigure(_UNIFORM, f"{_LEAD}, mean of SLO scales 1 to 1.5", "+0.10", "6.2, figure 6a", _lead_at()),
    PaperFigure(_UNIFORM, f"{_LEAD}, SLO scale 1.1", "+0.28", "6.2", _lead_at(1.1)),
    PaperFigure(
        *(_UNIFORM, "most on time at a fixed degree, SLO scale 1", "below 0.6", "2.3, figure 3a"),
        *(lambda found, policy: f"{found.best_fixed(1.0):.2f}", True),
    ),
    PaperFigure(_SKEWED, f"{_LEAD}, mean of SLO scales 1 to 1.5", "+0.15", "6.2, figure 7a", _lead_at()),
    PaperFigure(_SKEWED, f"{_LEAD}, SLO scale 1.2", "+0.32", "6.2", _lead_at(1.2)),
    PaperFigure(
        *(_GENSERVE, "all / images / videos on time, SLO scale 0.5", "0.63 / 0.94 / 0.32", "figure 14"),
        _split_by_model(0.5),
    ),
    PaperFigure(
        *(_GENSERVE, "the same, FCFS (4 GPUs each)", "0.20 / 0.20 / 0.20", "figure 14"),
        *(_split_by_model(0.5, _TALK_FCFS), True),
    ),
    PaperFigure(_GENSERVE, f"{_LEAD}, SLO scale 0.5", "not stated", "figure 10", _lead_at(0.5)),
    PaperFigure(_GENSERVE, "mean wait of images", "0.1 s", "figure 14", _image_wait()),
    PaperFigure(_GENSERVE, "the same, FCFS (4 GPUs each)", "15.9 s", "figure 14", _image_wait(_TALK_FCFS), True),
    PaperFigure(
        *(_DIT, "FCFS at optimal degrees over it, latency per step and token, by rate", "3 to 4", "4.3, figure 7"),
        _latency_ratio(lambda result: result.details["latency_per_work_s"]),
    ),
    PaperFigure(
        *(_DIT, "the same, mean latency", "not stated", "figure 7"),
        _latency_ratio(lambda result: result.row["mean_s"]),
    ),
    PaperFigure(
        *(_PATCHED, "on time, less that of FCFS (1 GPU each), mean over rates", "+0.30 (NIRVANA)", "8.1, figure 12"),
        _mean_lead,
    ),
    PaperFigure(
        *(_PATCHED, "rate with 90 % on time, over that of FCFS", "5.33 (NIRVANA), 1.06 (Mixed-Cache)", "8.1"),
        _rate_ratio,
    ),
)


def make_related_table(results: Results) -> Table:
    """Our figures beside the papers', of the settings that have results of all their policies."""
    found = {name: _SettingResults(setting, results) for name, setting in RELATED.items()}
    rows = []
    for figure in FIGURES:
        setting = found[figure.setting]
        if setting.num_seeds:
            system = setting.setting.system
            default = "-" if figure.about_baseline else figure.measure(setting, "default")
            ours = figure.measure(setting, system)
            rows.append(
                (figure.setting, figure.what, figure.paper, figure.source, ours, default, f"{setting.num_seeds}")
            )
    gpus = {setting.gpu for setting in RELATED.values()}
    note = "GPUs are modelled: the times of the L20 table, divided by one number each: " + "; ".join(
        f"{gpu.name} {gpu.speed:.2f} ({gpu.why})" for gpu in sorted(gpus, key=lambda gpu: gpu.name)
    )
    header = ("setting", "figure", "paper", "where", "ours", "default in its place", "seeds")
    return Table("Related systems, each in the setting of its paper", header, tuple(rows), f"{note}.")


def write_related(folder: Path, table: Table) -> Path:
    """Writes `related.csv`."""
    path = folder / "related.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([table.header, *table.rows])
    return path
