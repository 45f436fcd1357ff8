"""Short rows of workloads by name, as docs/evaluation/paper-cells.csv keeps them, and the tables of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Self

import pandas as pd

from dispatch.options import DEFAULT_POLICY
from dispatch.policies.paper.deviations import PAPER_POLICY
from lib.evaluate.cells import Cell, Settings
from lib.evaluate.kept.kept_table import shorten
from lib.evaluate.rows import CellResult
from lib.evaluate.tables import SETTING, Table, average_seeds, make_claims_table


@dataclass(frozen=True, slots=True)
class NamedRow:
    """The figures of one policy on one trace of a workload by name. The names are those of results.csv."""

    arrivals: str
    """The process of arrivals; `own`: that of the workload."""
    rate_scale: float
    """The factor of the workload's rate."""
    model: str
    """The model."""
    workload: str
    """The name of the workload."""
    slo_scale: float
    """The factor of the workload's deadlines."""
    seed: int
    """The number of the trace among those of its workload."""
    policy: str
    """The policy that served the trace."""
    gpus: int
    """The number of GPUs."""
    duration_s: float
    """The seconds during which requests arrive."""
    requests: int
    """The number of requests."""
    slo_attainment: float
    """The share of requests on time."""
    bound_attainment: float
    """The largest share on time that the linear program allows."""
    mean_all_s: float
    """The mean latency of all requests; one without a result counts until the end of the simulation."""
    p95_all_s: float
    """The 95th percentile of these latencies."""
    ooms: int
    """The number of requests that were lost for lack of memory."""
    unfinished: int
    """The number of requests without a result when the simulation ended."""
    placement_switches: int
    """The number of changes of the placement."""
    cut_short: int
    """The number of decisions whose solve hit its time limit."""
    version: str
    """The commit of the code."""

    @classmethod
    def from_result(cls, cell: Cell, result: CellResult) -> Self:
        """The row of a finished cell."""
        row, parameters = result.row, json.loads(result.row["parameters"])
        return cls(
            arrivals=parameters["arrivals"],
            rate_scale=parameters["rate_scale"],
            model=cell.model,
            workload=cell.workload,
            slo_scale=cell.slo_scale,
            seed=cell.seed,
            policy=cell.policy,
            gpus=row["gpus"],
            duration_s=row["duration_s"],
            requests=row["requests"],
            slo_attainment=shorten(row["slo_attainment"]),
            bound_attainment=shorten(row["bound_attainment"]),
            mean_all_s=shorten(row["mean_all_s"]),
            p95_all_s=shorten(row["p95_all_s"]),
            ooms=row["ooms"],
            unfinished=row["unfinished"],
            placement_switches=row["placement_switches"],
            cut_short=row["cut_short"],
            version=row["version"],
        )

    @classmethod
    def make_key(cls, cell: Cell, settings: Settings) -> tuple[str, float, int, float, str, str, float, int, str]:
        """The trace and the policy, which a table has once."""
        load = (settings.named_load.process, settings.named_load.rate_scale, settings.gpus, settings.duration_s)
        return *load, cell.model, cell.workload, cell.slo_scale, cell.seed, cell.policy

    @property
    def key(self) -> tuple[str, float, int, float, str, str, float, int, str]:
        """The trace and the policy, which a table has once."""
        load = (self.arrivals, self.rate_scale, self.gpus, self.duration_s)
        return *load, self.model, self.workload, self.slo_scale, self.seed, self.policy


def compare_named(rows: Iterable[NamedRow]) -> Iterator[Table]:
    """For each kind of load all policies, then the default over each baseline, and the paper's policy over each."""
    frame = pd.DataFrame([asdict(row) for row in rows])
    for (arrivals, rate_scale, gpus, duration_s), found in frame.groupby(
        ["arrivals", "rate_scale", "gpus", "duration_s"]
    ):
        means = average_seeds(found.drop(columns=["arrivals", "seed", "version"]))
        load = f"{gpus} GPUs, {duration_s:g} s of {'even' if arrivals == 'own' else arrivals} arrivals"
        if rate_scale != 1:
            load += f", {rate_scale:g} times the rate"
        policies = set(means["policy"])
        if DEFAULT_POLICY in policies:
            yield _sum_up_named(means, load)
        for policy in (DEFAULT_POLICY, PAPER_POLICY):
            if policy in policies:
                yield make_claims_table(means, policy, f"{policy} over each baseline, {load}")


def _sum_up_named(means: pd.DataFrame, load: str) -> Table:
    """Each policy over the settings of one load, those that have most on time first."""
    rows = []
    pairs = means.merge(means[means["policy"] == DEFAULT_POLICY], on=SETTING, suffixes=("", "_ours"))
    for policy in pairs.groupby("policy")["slo_attainment"].mean().sort_values(ascending=False).index:
        found = pairs[pairs["policy"] == policy]
        on_time = found["slo_attainment"]
        rows.append(
            (
                *(str(policy), f"{len(found)}", f"{on_time.mean():.3f}", f"{on_time.min():.3f}"),
                *(f"{(found[name] / found[f'{name}_ours']).median():.2f}" for name in ("mean_all_s", "p95_all_s")),
                f"{(found['ooms'] > 0).sum()}",
                f"{found['placement_switches'].sum():.0f}",
            )
        )
    header = (
        *("policy", "cells", "on time", "lowest", "mean latency over the default's", "P95 over the default's"),
        *("cells where it runs out of memory", "switches"),
    )
    bound = means[means["policy"] == DEFAULT_POLICY]["bound_attainment"]
    note = (
        "Shares of requests on time: the mean over models and workloads, and the lowest of them. Latencies count all "
        "requests; they are the median of the ratios in each cell. The bound on the share on time has a mean of "
        f"{bound.mean():.3f}."
    )
    return Table(f"All policies, {load}", header, tuple(rows), note)
