"""The parts of the evaluation on results made by hand: what is kept, what is compared, what is shown."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from statistics import fmean

import pytest
from lib.evaluate.cells import MIXED, list_cells
from lib.evaluate.kept.store import Store
from lib.evaluate.plots import draw_plots
from lib.evaluate.report import make_tables, write_csv
from lib.evaluate.rows import COLUMNS, TraceRun, count_types, make_details, make_row
from lib.evaluate.runner import run_cells
from lib.evaluate.tables import compute_means, make_cells_table, make_claims_table, make_ratios_table, summarize

from tests.scripts.evaluate.results import SETTINGS, cell, fake_run, made
from tridentserve.engine.simulated import Counts, RequestResult, SimulationResult
from tridentserve.errors import ConfigError
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import Stage, VirtualReplica


def test_policies_share_a_trace_and_other_cells_do_not() -> None:
    cells = list(
        list_cells(["flux.1-dev", "sd3-medium"], ["light", "dynamic"], ["default", "b1"], seeds=2, slo_scales=(1, 2))
    )
    assert len(set(cells)) == len(cells) == 2 * 2 * 2 * 2 * 2
    assert len({one.trace_seed for one in cells}) == 2 * 2 * 2
    assert [one.policy for one in cells[:2]] == ["default", "b1"]


def test_workloads_with_models_of_their_own_come_once() -> None:
    cells = list(list_cells(["flux.1-dev", "sd3-medium"], ["genserve", "patchedserve"], ["default"], seeds=1))
    assert [(one.model, one.workload) for one in cells] == [(MIXED, "genserve"), ("sd3-medium", "patchedserve")]
    with pytest.raises(ConfigError, match="no workload is named 'x'"):
        list(list_cells(["flux.1-dev"], ["x"], ["default"], seeds=1))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_faulty_policy_stops_no_other(jobs: int) -> None:
    cells = [cell(policy) for policy in ("default", "b6", "b1")]
    found = dict(run_cells(cells, SETTINGS, jobs, fake_run))
    assert sorted(found) == sorted(cells)
    assert "a fault of b6" in str(found[cell("b6")])
    assert found[cell("b1")] == made(cell("b1"), attainment=0.25)


def test_store_keeps_cells_and_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    store = Store(tmp_path, SETTINGS)
    store.add(cell("b1"), made(cell("b1")))
    store.add(cell(), made(cell()))
    path = tmp_path / "cells.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    again = Store(tmp_path, SETTINGS)
    assert cell("b1") in again
    assert cell() not in again
    again.add(cell(), made(cell()))
    assert Store(tmp_path, SETTINGS).results == {cell("b1"): made(cell("b1")), cell(): made(cell())}


def result_of(*requests: RequestResult) -> SimulationResult:
    counts = Counts(switches=3, load_bytes=10, transfer_bytes=5, ticks=4, solve_seconds=0.02)
    counts.methods["greedy (no solution of the search at the time limit of 0.1 s)"] += 2
    counts.methods["ilp"] += 1
    return SimulationResult(requests, counts, 40.0, 8, {Stage.DIFFUSE: 160.0}, [])


def request(index: int, end_s: float | None, outcome: str) -> RequestResult:
    spec = RequestSpec(f"r{index}", "one", Shape(64, 64), 4)
    served = VirtualReplica.V1 if outcome == "finished" else None
    return RequestResult(spec, 10.0, end_s, 5.0, outcome, 0, served)


def test_a_row_counts_requests_without_a_result_until_the_end() -> None:
    result = result_of(request(0, 14.0, "finished"), request(1, 12.0, "out_of_memory"), request(2, None, "unfinished"))
    row = make_row([TraceRun(result, 30.0)], bound=3, wall_s=1.0)
    assert (row["mean_s"], row["p95_s"]) == (4.0, 4.0)
    assert row["mean_all_s"] == pytest.approx((4.0 + 30.0 + 30.0) / 3)
    assert (row["completed"], row["failed"], row["ooms"], row["unfinished"]) == (1, 1, 1, 1)
    assert row["slo_attainment"] == pytest.approx(1 / 3)
    assert (row["v1_share"], row["moved_bytes"], row["utilisation"], row["solve_mean_ms"]) == (1.0, 15, 0.5, 5.0)
    assert row["cut_short"] == 2
    assert set(row) < set(COLUMNS)


def test_the_traces_of_a_cell_count_as_one() -> None:
    runs = [
        TraceRun(result_of(request(0, 14.0, "finished"), request(1, None, "unfinished")), 60.0),
        TraceRun(result_of(request(2, 40.0, "finished")), 30.0),
    ]
    row = make_row(runs, bound=2, wall_s=1.0)
    assert (row["requests"], row["unfinished"], row["placement_switches"], row["cut_short"]) == (3, 1, 6, 4)
    assert row["slo_attainment"] == pytest.approx(1 / 3)
    assert row["mean_all_s"] == pytest.approx((4.0 + 50.0 + 30.0) / 3)
    assert row["bound_attainment"] == pytest.approx(2 / 3)
    assert (row["end_s"], row["utilisation"]) == (80.0, 0.5)
    details = make_details(runs)
    assert [since_s for since_s, _ in details["throughput"]][-1] > 40.0  # the second follows the first
    assert details["models"]["one"] == {"slo_attainment": pytest.approx(1 / 3), "wait_s": pytest.approx(30.0)}


def test_a_policy_that_finishes_nothing_has_no_latency_but_a_row() -> None:
    row = make_row([TraceRun(result_of(request(0, 12.0, "out_of_memory")), 60.0)], bound=0, wall_s=1.0)
    assert row["mean_s"] is None
    assert row["mean_all_s"] == 50.0


def test_placement_types_of_a_plan() -> None:
    def replicas(*stages: Stage) -> frozenset[Replica]:
        return frozenset(Replica("one", stage) for stage in stages)

    plan = PlacementPlan({"a": replicas(*Stage), "b": replicas(Stage.ENCODE), "c": replicas(*Stage), "d": replicas()})
    assert count_types(plan) == {"EDC": 2, "E": 1, "none": 1}


def test_means_over_seeds_and_none_where_one_seed_has_none() -> None:
    first, second = cell(seed=0), cell(seed=1)
    found = compute_means({first: made(first, 0.4), second: made(second, 0.6, mean_s=None)})
    (row,) = found.to_dict("records")
    assert row["seeds"] == 2
    assert row["slo_attainment"] == pytest.approx(0.5)
    assert math.isnan(row["mean_s"])


def test_means_are_rounded_once() -> None:
    shares = [0.1, 0.7, 0.3, 0.9, 0.6, 0.1, 0.2]
    found = compute_means({cell(seed=seed): made(cell(seed=seed), share) for seed, share in enumerate(shares)})
    assert found["slo_attainment"].tolist() == [fmean(shares)]


def test_the_csv_file_has_one_row_for_each_cell_and_nothing_for_none(tmp_path: Path) -> None:
    results = {cell(): made(cell(), 0.1 + 0.2), cell("b1"): made(cell("b1"), mean_s=None)}
    path = write_csv(tmp_path, results)
    assert [one.name for one in tmp_path.iterdir()] == ["results.csv"]
    assert path.read_bytes().startswith(",".join(COLUMNS).encode() + b"\nflux.1-dev,light,default,0,8,60.0,1.0,100,")
    assert set(made(cell()).row) == set(COLUMNS)
    with path.open(encoding="utf-8", newline="") as file:
        ours, other = csv.DictReader(file)
    assert (ours["slo_attainment"], ours["mean_s"], ours["ooms"]) == ("0.30000000000000004", "2.0", "0")
    assert (other["mean_s"], other["p95_all_s"], other["options"]) == ("", "", made(cell()).row["options"])


def test_a_summary_is_in_the_order_asked_with_ratios_to_the_first() -> None:
    results = {one: made(one, share) for one, share in [(cell("b1"), 0.2), (cell("default"), 0.5), (cell("edf"), 0.4)]}
    results |= {cell("b1", "heavy"): made(cell("b1", "heavy"), 0.3, mean_s=None)}
    results |= {cell("default", "heavy"): made(cell("default", "heavy"), 0.0)}
    rows = summarize(results, ["default", "edf", "b1"])
    assert [(row["workload"], row["policy"]) for row in rows] == [
        *[("light", "default"), ("light", "edf"), ("light", "b1")],
        *[("heavy", "default"), ("heavy", "b1")],
    ]
    assert [row["slo_attainment_ratio"] for row in rows[:3]] == [1.0, 0.8, 0.4]
    assert math.isinf(rows[4]["slo_attainment_ratio"])
    assert math.isnan(rows[4]["mean_s"])
    assert math.isnan(rows[4]["mean_s_ratio"])
    # The first policy has no result: its ratios are of nothing.
    assert all(math.isnan(row["mean_s_ratio"]) for row in summarize(results, ["b2", "default"]))
    assert summarize({}, ["default"]) == []


def test_a_policy_without_any_latency_has_tables_and_figures() -> None:
    results = {cell(): made(cell()), cell("b1"): made(cell("b1"), mean_s=None, mean_all_s=60.0, p95_all_s=60.0)}
    row = next(row for row in make_cells_table(results).rows if row[3] == "b1")
    assert row[8:13] == ("-", "-", "-", "-", "60.0")
    nobody = {one: made(one, mean_s=None) for one in results}
    assert "baselines-flux.1-dev" in [name for name, _, _ in draw_plots(nobody)]


def test_claims_leave_out_cells_that_ran_out_of_memory_and_count_them() -> None:
    results = {
        **{cell("default", w): made(cell("default", w), 0.9, 2.0) for w in ("light", "heavy", "dynamic")},
        cell("b1", "light"): made(cell("b1", "light"), 0.3, 8.0),
        cell("b1", "heavy"): made(cell("b1", "heavy"), 0.1, 1.0, ooms=50, completed=50),
        cell("b1", "dynamic"): made(cell("b1", "dynamic"), 0.0, 6.0),
    }
    over_b1 = make_claims_table(compute_means(results)).rows[0]
    assert over_b1[:4] == ("b1", "2", "3.00 / 3.00 / 3.00 (∞ in 1)", "2.1 to 6.6")
    assert over_b1[4] == "3.00 / 3.50 / 4.00"
    assert over_b1[8:] == ("1 (flux.1-dev)", "0")
    ratios = {row[1]: row[4] for row in make_ratios_table(results).rows}
    assert ratios == {"light": "3.00", "heavy": "9.00 OOM", "dynamic": "∞"}


def test_figures_for_what_there_is(tmp_path: Path) -> None:
    bench = tmp_path / "bench.txt"
    bench.write_text('machine\n{"rows": [{"policy": "default", "gpus": 128, "p50_ms": 9.0, "p99_ms": 20.0}]}\n')
    results = {one: made(one) for policy in ("default", "b1", "wo-switch") for one in [cell(policy)]}
    names = [name for name, _, _ in draw_plots(results, bench)]
    model = "flux.1-dev"
    assert names == [f"{kind}-{model}" for kind in ("baselines", "ablations", "timeline", "cdf")] + ["scalability"]
    bench.write_text("no json")
    with pytest.raises(ConfigError, match=r"not the output of scripts/bench_dispatch\.py"):
        list(draw_plots(results, bench))


def test_tables_as_markdown_have_one_width() -> None:
    results = {one: made(one) for policy in ("default", "b1") for one in [cell(policy)]}
    for table in make_tables(results):
        lines = [line for line in table.to_markdown().splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == 1
    only = {cell("b1"): made(cell("b1"))}
    assert [table.title for table in make_tables(only)] == ["All cells"]
