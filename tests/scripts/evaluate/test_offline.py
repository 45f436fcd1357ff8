"""`evaluate.py --offline`: sets of requests that are all there at time zero, and the bound on their makespan."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest
from evaluate import main
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from lib.evaluate.related_systems.fixed_degrees import FIXED_DEGREES
from lib.evaluate.related_systems.offline_sets import OFFLINE, Deadlines, OfflineQuestion, run_offline
from lib.evaluate.related_systems.offline_table import list_set_rows, make_offline_table

from deployments.assembly.simulation import load_times
from dispatch.policies import POLICIES
from tests.scripts.evaluate.results import SETTINGS
from tridentserve.errors import PlacementError

QUESTION = OfflineQuestion("dit-serve", 12, "far")
# With the stages on every worker, E in batches, step-level batches, auxiliaries, and fixed degrees.
SERVED = ["default", "dit-serve", "dit-serve-fcfs", "genserve", "patchedserve", "tridentserve-paper", "b6", "segments"]


@settings(max_examples=20)
@given(
    st.sampled_from(["dit-serve", "genserve", "tetriserve-skewed", "sd3-medium-heavy"]),
    st.sampled_from([*SERVED, *FIXED_DEGREES]),
    st.integers(1, 12),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 999),
    st.sampled_from(get_args(Deadlines)),
)
def test_no_policy_comes_below_the_bound(
    mix: str, policy: str, num_requests: int, gpus: int, seed: int, deadlines: Deadlines
) -> None:
    question = OfflineQuestion(mix, num_requests, deadlines)
    (cell,) = question.list_cells(seed, 1, [policy])
    try:
        details = run_offline(question, cell, replace(SETTINGS, gpus=gpus)).details
    except PlacementError:  # the cluster is too small for the models, or for a group of each stage
        reject()
    assert details["bound_s"] > 0
    if details["makespan_s"] is not None:
        assert details["makespan_s"] >= details["bound_s"] * (1 - 1e-9)


def test_all_policies_serve_the_same_set_and_other_sets_ask_for_other_work() -> None:
    cells = list(QUESTION.list_cells(7, 2, ["default", "b3"]))
    assert [(cell.index, cell.policy) for cell in cells] == [(0, "default"), (0, "b3"), (1, "default"), (1, "b3")]
    times = load_times(SETTINGS.read_cluster_spec(), [SETTINGS.profiles])()
    first, same, other, _ = (QUESTION.draw(cell, times, times.models) for cell in cells)
    assert first == same
    assert {arrival_s for arrival_s, _ in first} == {0.0}
    work = [sorted((spec.shape.tokens, spec.num_inference_steps) for _, spec in each) for each in (first, other)]
    assert work[0] != work[1]


def test_deadlines_are_far_or_those_of_the_rule() -> None:
    times = load_times(SETTINGS.read_cluster_spec(), [SETTINGS.profiles])()
    (cell,) = QUESTION.list_cells(7, 1, ["default"])
    far = QUESTION.draw(cell, times, times.models)
    rule = replace(QUESTION, deadlines="rule").draw(cell, times, times.models)
    assert min(spec.slo_s or 0.0 for _, spec in far) > 100 * max(spec.slo_s or 0.0 for _, spec in rule)


def test_a_request_without_a_result_leaves_no_makespan() -> None:
    (cell,) = QUESTION.list_cells(7, 1, ["default"])
    result = run_offline(QUESTION, cell, SETTINGS)
    row = result.row | {"completed": result.row["requests"] - 1}
    rows = list_set_rows({cell: replace(result, row=row, details=result.details | {"makespan_s": None})})
    table = make_offline_table(rows, ["default"], "a set")
    assert (table.rows[0][2], table.rows[0][5], table.rows[0][6]) == ("-", "-", "1")


def test_a_quick_run_prints_a_table_and_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--offline", "--quick", "--policies", "default", FIXED_DEGREES[0], "--seeds", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "## dit-serve: 8 requests on 8 GPUs, seed 0" in printed
    result = json.loads(printed[-1])
    assert (result["cells"], result["finished"]) == (4, 4)
    assert [(row["policy"], row["set"]) for row in result["rows"]] == [
        ("default", 0),
        (FIXED_DEGREES[0], 0),
        ("default", 1),
        (FIXED_DEGREES[0], 1),
    ]
    for row in result["rows"]:
        assert row["without_result"] == 0
        assert row["over_bound"] == pytest.approx(row["makespan_s"] / row["bound_s"])
        assert 0 < row["mean_s"] <= row["p95_s"] <= row["makespan_s"]


def test_a_cluster_of_ones_own_and_another_mix(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ["--cluster", "deployments/clusters/l20-8.yaml", "--mix", "flux.1-dev-light"]
    assert main(["--offline", "--quick", "--seeds", "1", *cluster, "--deadlines", "rule"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["policy"] for row in rows] == ["default", "b3"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--offline", "--related"], "--offline does not go together with"),
        (["--requests", "9"], "give --offline"),
        (["--mix", "genserve"], "give --offline"),
        (["--offline", "--rate-scale", "2"], "of workloads by name alone"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert told in capsys.readouterr().err


def test_an_unknown_mix_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--offline", "--quick", "--mix", "nothing"]) == 2
    assert "no mix is named" in capsys.readouterr().err


def test_the_policies_of_the_setting_are_there() -> None:
    policies = OFFLINE["policies"]
    assert isinstance(policies, list)
    assert {name for name in policies if ":" not in name} <= POLICIES.keys()
