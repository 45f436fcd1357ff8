"""`replay_trace.py --simulate`: the report of a live replay, the same decisions each time, and D on its own."""

from __future__ import annotations

import csv
import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from profiler import ProfileTable, keep_diffuse_only, read_shipped_table, write_table
from tests.support.decision_log import read_log
from tests.support.processes import output_of
from tridentserve.requests import Shape
from tridentserve.scheduling import events as ev
from tridentserve.stages import Stage

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "replay_trace.py"
main = runpy.run_path(str(SCRIPT))["main"]
CLUSTER = "nodes: {}\ngpus_per_node: {}\ngpu: NVIDIA L20\nmemory_gb: 48\n"
HEADER = "request_id,timestamp,height,width,num_frames,prompt,negative_prompt,num_inference_steps,slo_ms,model\n"
SIDES = (512, 768, 1024, 1536)


def write_trace(folder: Path, rows: list[tuple[float, int, str]], model: str = "sd3-medium") -> Path:
    """Rows are (timestamp, side, slo_ms)."""
    lines = [f"{i},{at_s},{side},{side},1,a fox,,20,{slo_ms},{model}\n" for i, (at_s, side, slo_ms) in enumerate(rows)]
    path = folder / "trace.csv"
    path.write_text(HEADER + "".join(lines))
    return path


def busy_trace(folder: Path) -> Path:
    """More than 16 GPUs can do at once, with all sizes."""
    return write_trace(folder, [(0.05 * i, SIDES[i % 4], "") for i in range(120)])


def write_cluster(folder: Path, nodes: int, per_node: int) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(CLUSTER.format(nodes, per_node))
    return path


def simulate(folder: Path, trace: Path, cluster: Path, *options: str) -> int:
    # No solve of these sizes takes that long: a busy machine does not change what is decided.
    limit = ["--solve-limit-s", "60"]
    return int(main([str(trace), "--simulate", str(cluster), "--out", str(folder / "out"), *limit, *options]))


def requests_csv(folder: Path) -> list[dict[str, str]]:
    with (folder / "out" / "requests.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_report_is_that_of_a_live_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, cluster = busy_trace(tmp_path), write_cluster(tmp_path, 2, 8)
    assert simulate(tmp_path, trace, cluster, "--limit", "40", "--speed", "2", "--steps", "10") == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (figures["completed_requests"], figures["failed_requests"]) == (40, 0)
    rows = requests_csv(tmp_path)
    assert [float(row["sent_s"]) for row in rows] == pytest.approx([0.025 * i for i in range(40)])
    for row in rows:
        stages = sum(float(row[f"{stage}_s"]) for stage in ("encode", "diffuse", "decode"))
        assert float(row["latency_s"]) >= float(row["queue_s"]) + stages - 1e-6
        assert float(row["peak_memory_mb"]) > 10_000
        assert row["diffuse_workers"].startswith("n")
    met = sum(row["slo_met"] == "True" for row in rows)
    assert figures["slo_attainment_rate"] == met / 40
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"encode", "diffuse", "decode"}
    assert all("simulated" in event["args"]["name"] for event in events if event["name"] == "process_name")


def test_the_deadline_of_a_row_wins_over_the_rule(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, [(0.0, 1024, "1"), (100.0, 1024, "90000"), (200.0, 1024, "")])
    assert simulate(tmp_path, trace, write_cluster(tmp_path, 1, 1)) == 0
    rows = requests_csv(tmp_path)
    assert [float(row["slo_s"]) for row in rows[:2]] == [0.001, 90.0]
    assert [row["slo_met"] for row in rows] == ["False", "True", "True"]
    # Alone on one GPU: 2.5 times the latency at degree 1, or less where wider degrees would be optimal.
    assert 0 < float(rows[2]["slo_s"]) <= 2.5 * float(rows[2]["latency_s"]) + 1e-6


def test_rows_say_what_is_done_when_they_are_late_and_how_urgent_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one GPU, where each takes 6.4 s alone."""
    asked = {
        "degraded": "5000,degrade,",
        "first": "90000,,",
        "refused": "6000,refuse,",
        "earlier": "90000,,",
        "later": "90000,wait,2",
    }
    times_s = {"degraded": 0.0, "first": 50.0, "refused": 51.0, "earlier": 51.1, "later": 51.2}
    rows = [f"{name},{times_s[name]},1024,1024,1,a fox,,20,sd3-medium,{asked[name]}\n" for name in asked]
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADER.replace("slo_ms,model", "model,slo_ms,on_late,priority") + "".join(rows))
    log = tmp_path / "log.jsonl"
    assert simulate(tmp_path, trace, write_cluster(tmp_path, 1, 1), "--decision-log", str(log)) == 1
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [figures[f"{name}_requests"] for name in ("completed", "failed", "refused", "degraded")] == [4, 1, 1, 1]
    told = {row["request_id"]: row for row in requests_csv(tmp_path)}
    assert (float(told["refused"]["latency_s"]), told["refused"]["diffuse_workers"]) == (0.0, "")
    assert "it is predicted to end " in told["refused"]["error"]
    assert float(told["later"]["queue_s"]) < float(told["earlier"]["queue_s"])
    assert (told["degraded"]["quality"], told["degraded"]["slo_met"]) == ("fast", "True")
    events = [entry.event for entry in read_log(log)]
    specs = [event.spec for event in events if isinstance(event, ev.RequestArrived)]
    handed_on = {spec.request_id: (spec.on_late, spec.priority) for spec in specs}
    assert handed_on == {
        "degraded": ("degrade", 0),
        "first": ("wait", 0),
        "refused": ("refuse", 0),
        "earlier": ("wait", 0),
        "later": ("wait", 2),
    }


def test_what_does_not_fit_fails_out_of_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path, [(0.0, 4096, ""), (0.0, 512, "")], model="flux.1-dev")
    assert simulate(tmp_path, trace, write_cluster(tmp_path, 1, 8), "--policy", "b1") == 1
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["completed_requests"], figures["oom_requests"]) == (1, 1)
    assert requests_csv(tmp_path)[0]["error"].startswith("out of memory: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "best"], "'best' is no policy; use one of default, b1,"),
        (["--model", "sdxl"], "'sdxl' is not profiled; choose one with --model (cogvideox1.5-5b, flux.1-dev,"),
        (["--scale-pixels", "100"], "request 0: sd3-medium encode at degree 1: 5120x5120 is outside the profiled"),
        (["--profiles", "b200"], "no shipped profile table is named 'b200'"),
        (["--jitter", "-1"], "--jitter"),
        (["--timeout-s", "5"], "--timeout-s: needs --url"),
        (["--url", "http://127.0.0.1:1"], "--url: not allowed with argument --simulate"),
    ],
)
def test_bad_usage_is_exit_status_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    trace, cluster = busy_trace(tmp_path), write_cluster(tmp_path, 1, 8)
    try:
        status = simulate(tmp_path, trace, cluster, *options)
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    errors = capsys.readouterr().err
    assert status == 2
    assert errors.count("\n") == 1
    assert message in errors


def test_a_trace_without_models_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, cluster = write_trace(tmp_path, [(0.0, 512, "")], model=""), write_cluster(tmp_path, 1, 1)
    assert simulate(tmp_path, trace, cluster) == 2
    assert "request 0 names no model: choose one with --model (cogvideox1.5-5b, " in capsys.readouterr().err
    assert simulate(tmp_path, trace, cluster, "--model", "sd3-medium") == 0


def test_a_bad_cluster_names_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, cluster = busy_trace(tmp_path), tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER.format(1, 8).replace("memory_gb", "memory"))
    assert simulate(tmp_path, trace, cluster) == 2
    assert "cluster.yaml: memory" in capsys.readouterr().err


def test_the_same_trace_and_seed_give_one_decision_log(tmp_path: Path) -> None:
    trace, cluster = busy_trace(tmp_path), write_cluster(tmp_path, 2, 8)
    logs = [tmp_path / f"{number}.jsonl" for number in range(3)]
    options = ["--jitter", "0.1", "--seed", "5", "--solve-limit-s", "60"]
    for log in logs[:2]:
        assert simulate(tmp_path, trace, cluster, *options, "--decision-log", str(log)) == 0
    command = [sys.executable, str(SCRIPT), str(trace), "--simulate", str(cluster), "--out", str(tmp_path / "out")]
    command += [*options, "--decision-log", str(logs[2])]
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    output_of(command, ROOT, environment)
    first = logs[0].read_bytes()
    assert first.count(b"\n") > 300
    assert all(log.read_bytes() == first for log in logs[1:])
    other = tmp_path / "other.jsonl"
    assert simulate(tmp_path, trace, cluster, "--jitter", "0.1", "--seed", "6", "--decision-log", str(other)) == 0
    assert other.read_bytes() != first


@pytest.mark.parametrize("module", ["lib.replay.simulated", "lib.sizing", "compare_simulation"])
def test_simulating_starts_without_torch_and_ray(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'ray', 'torch', 'diffusers'}} & set(sys.modules)))"
    assert output_of([sys.executable, "-c", code], SCRIPT.parent).strip() == "[]"


def slower_ends(table: ProfileTable, factor: float) -> ProfileTable:
    """E and C take longer."""
    rows = (r if r.stage is Stage.DIFFUSE else replace(r, seconds=factor * r.seconds) for r in table.rows)
    return replace(table, rows=tuple(rows))


def step_seconds(side: int) -> float:
    rows = read_shipped_table("l20").rows
    found = [
        row.seconds
        for row in rows
        if (row.model, row.stage, row.shape, row.degree, row.batch)
        == ("sd3-medium", Stage.DIFFUSE, Shape(side, side), 1, 1)
    ]
    return found[0]


@pytest.mark.parametrize("policy", ["default", "b3", "edf"])
def test_with_d_only_profiles_one_gpu_does_one_d_after_the_other(tmp_path: Path, policy: str) -> None:
    """The schedule by hand: the GPU is never idle, and each request takes 20 steps and nothing else."""
    write_table(tmp_path / "d-only" / "l20.csv", keep_diffuse_only(read_shipped_table("l20")))
    sides = (512, 1024, 1536)
    trace = write_trace(tmp_path, [(0.0, side, "") for side in sides])
    assert simulate(
        tmp_path, trace, write_cluster(tmp_path, 1, 1), "--profiles", str(tmp_path / "d-only"), "--policy", policy
    ) in (0, 1)
    rows = requests_csv(tmp_path)
    took_s = {row["request_id"]: 20 * step_seconds(side) for row, side in zip(rows, sides, strict=True)}
    ended_s = 0.0
    met = 0
    for row in sorted(rows, key=lambda row: float(row["latency_s"])):
        ended_s += took_s[row["request_id"]]
        assert float(row["latency_s"]) == pytest.approx(ended_s, abs=1e-5)
        assert (float(row["encode_s"]), float(row["decode_s"])) == (0.0, 0.0)
        met += ended_s <= float(row["slo_s"])
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["slo_met_success"] == met


@pytest.mark.parametrize("policy", ["default", "b6"])
def test_with_d_only_profiles_e_and_c_change_nothing(tmp_path: Path, policy: str) -> None:
    trace, cluster = busy_trace(tmp_path), write_cluster(tmp_path, 2, 8)
    logs = []
    for factor in (1.0, 30.0):
        folder = tmp_path / f"times-{factor}"
        write_table(folder / "l20.csv", keep_diffuse_only(slower_ends(read_shipped_table("l20"), factor)))
        logs.append(folder / "log.jsonl")
        arguments = ["--profiles", str(folder), "--policy", policy, "--decision-log", str(logs[-1])]
        assert simulate(tmp_path, trace, cluster, *arguments) == 0
    assert logs[0].read_bytes() == logs[1].read_bytes()
