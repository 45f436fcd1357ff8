from __future__ import annotations

import csv
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.reports.chrome import make_chrome_trace
from traces.reports.report import compute_percentile, format_summary, replay_duration_s, summarize, write_report
from traces.requests import TraceRequest
from traces.results import AnswerFacts, ReplayResult, TimelineEntry, simulated_result

# The figures that people compare, which must be there under exactly these names.
KEYS = {"duration", "completed_requests", "failed_requests", "throughput_qps", "slo_attainment_rate", "slo_met_success"}
KEYS |= {f"latency_{name}" for name in ("mean", "median", "p50", "p95", "p99")} | {"peak_memory_mb"}
KEYS |= {"oom_requests", "refused_requests", "degraded_requests"} | {
    f"stage_durations_{name}" for name in ("mean", "p50", "p99")
}


def span(stage: str, workers: tuple[str, ...], start_s: float, end_s: float, steps: int | None = None) -> TimelineEntry:
    return TimelineEntry(stage=stage, workers=workers, degree=len(workers), start_s=start_s, end_s=end_s, steps=steps)


def result(
    index: int, latency_s: float, error: str | None = None, slo_ms: float | None = None, **facts: Any
) -> ReplayResult:
    request = TraceRequest(str(index), float(index), 48, 64, 1, "a fox", "", 4, slo_ms=slo_ms)
    status = 200 if error is None else None
    return ReplayResult(
        request, "tiny", f"run-{index}", float(index), 0.01 * index, latency_s, status, error, AnswerFacts(**facts)
    )


RESULTS = [
    result(
        0,
        2.0,
        slo_ms=2500.0,
        stage_durations={"encode": 0.1, "diffuse": 1.0},
        peak_memory_mb=100.0,
        queue_s=0.5,
        timeline=(
            span("encode", ("w10",), 1000.0, 1000.1),
            span("diffuse", ("w2", "w3"), 1000.2, 1000.7, 2),
            span("diffuse", ("w2",), 1000.8, 1001.3, 2),
            span("decode", ("w2",), 1001.3, 1001.4),
        ),
    ),
    result(1, 4.0, slo_ms=2500.0, stage_durations={"encode": 0.3, "diffuse": 3.0}, peak_memory_mb=300.0),
    result(2, 0.5, error="HTTP 500: no", slo_ms=2500.0),
    result(3, 1.0),
]


def test_summary() -> None:
    figures = summarize(RESULTS, duration_s=8.0)
    assert set(figures) >= KEYS
    assert figures["duration"] == 8.0
    assert (figures["completed_requests"], figures["failed_requests"]) == (3, 1)
    assert figures["throughput_qps"] == 3 / 8
    assert figures["latency_mean"] == pytest.approx(7 / 3)
    assert figures["latency_median"] == figures["latency_p50"] == 2.0
    assert figures["latency_p95"] == pytest.approx(np.percentile([2.0, 4.0, 1.0], 95))
    # One of the three with a deadline met it; the fourth has none.
    assert figures["slo_attainment_rate"] == pytest.approx(1 / 3)
    assert figures["slo_met_success"] == 1
    assert figures["peak_memory_mb"] == 300.0
    assert figures["stage_durations_mean"] == pytest.approx({"encode": 0.2, "diffuse": 2.0})
    assert figures["stage_durations_p50"] == pytest.approx({"encode": 0.2, "diffuse": 2.0})
    assert figures["stage_durations_p99"] == pytest.approx({"encode": 0.298, "diffuse": 2.98})
    assert figures["send_lateness_max"] == 0.03
    assert figures["diffuse_degrees"] == {"1": 1, "2": 1}
    assert figures["errors"] == {"HTTP 500: no": 1}


def test_failures_are_misses_once_anything_has_a_deadline() -> None:
    # The service gives deadlines of its own, which a failed request never learns of.
    served, failed = result(0, 1.0, slo_s=2.0), result(1, 1.0, error="gone")
    assert summarize([served, failed], 1.0)["slo_attainment_rate"] == 0.5
    assert summarize([result(0, 1.0), failed], 1.0)["slo_attainment_rate"] is None
    assert summarize([result(1, 1.0, error="gone", slo_ms=1.0)], 1.0)["slo_attainment_rate"] == 0.0


def test_refused_and_degraded_requests_are_counted(tmp_path: Path) -> None:
    request = TraceRequest("0", 0.0, 48, 64, 1, "a fox", "", 4, on_late="degrade", priority=2)
    fewer = simulated_result(request, "tiny", 1.0, reduced_steps=3, quality="exact")
    lower = simulated_result(request, "tiny", 1.0, quality="fast")
    fast = replace(request, quality="fast")
    as_asked = [
        simulated_result(request, "tiny", 1.0, quality="exact"),
        simulated_result(fast, "tiny", 1.0, quality="fast"),
        simulated_result(fast, "tiny", 1.0, quality="exact"),  # its model has no other
        simulated_result(replace(request, on_late=None), "tiny", 1.0, quality="fast"),  # its model's default
        simulated_result(request, "tiny", 1.0),
    ]
    late = replace(request, on_late="refuse")
    refused = simulated_result(late, "tiny", 0.0, error="it is predicted to end late", error_code="deadline_missed")
    lost = simulated_result(late, "tiny", 1.0, error="lost", error_code="worker_failed")
    figures = write_report(tmp_path, [fewer, lower, *as_asked, refused, lost])
    assert (figures["refused_requests"], figures["degraded_requests"], figures["failed_requests"]) == (1, 2, 2)
    assert "refused / degraded     1 / 2\n" in format_summary(figures)
    with (tmp_path / "requests.csv").open(newline="") as file:
        first = next(csv.DictReader(file))
    assert [first[name] for name in ("on_late", "priority", "reduced_steps", "quality")] == [
        *("degrade", "2"),
        *("3", "exact"),
    ]


def test_figures_without_data_are_null() -> None:
    figures = summarize([result(1, 1.0, error="gone")], 1.0)
    assert figures["latency_p99"] is None
    assert figures["peak_memory_mb"] is None
    assert figures["stage_durations_mean"] == {}
    assert "-" in format_summary(figures)
    assert summarize([], 0.0)["throughput_qps"] is None


def test_a_simulation_is_reported_like_a_replay(tmp_path: Path) -> None:
    """The same requests, with and without HTTP: the same summary and the same slices."""
    spans = RESULTS[0].facts.timeline
    request = TraceRequest("0", 1.5, 48, 64, 1, "a fox", "", 4)
    done = simulated_result(request, "tiny", 2.0, slo_s=2.5, queue_s=0.5, peak_memory_mb=100.0, timeline=spans)
    assert done.facts.stage_durations == pytest.approx({"encode": 0.1, "diffuse": 1.0, "decode": 0.1})
    served = ReplayResult(request, "tiny", "0", 1.5, 0.0, 2.0, 200, None, done.facts)
    late = simulated_result(replace(request, slo_ms=900.0), "tiny", 1.0, slo_s=2.5)
    failed = simulated_result(request, "tiny", 0.5, error="out of memory: 60 GB of 48 GB", slo_s=2.5)
    assert write_report(tmp_path / "live", [served, late]) == write_report(tmp_path / "simulated", [done, late])
    for name in ("summary.json", "trace.json"):
        assert (tmp_path / "live" / name).read_text() == (tmp_path / "simulated" / name).read_text()
    figures = summarize([done, late, failed], 10.0)
    assert figures["slo_attainment_rate"] == pytest.approx(1 / 3), "the trace's deadline wins over the policy's"
    assert (figures["failed_requests"], figures["oom_requests"]) == (1, 1)
    assert summarize(RESULTS, 8.0)["oom_requests"] == 0


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert compute_percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_the_report_is_three_files(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    figures = write_report(folder, RESULTS)
    assert figures["duration"] == replay_duration_s(RESULTS) == 5.0
    assert json.loads((folder / "summary.json").read_text()) == figures
    assert json.loads((folder / "trace.json").read_text()) == json.loads(json.dumps(make_chrome_trace(RESULTS)))
    with (folder / "requests.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["request_id"] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0]["diffuse_workers"] == "w2+w3 w2"
    assert (rows[0]["slo_met"], rows[1]["slo_met"], rows[2]["slo_met"], rows[3]["slo_met"]) == (
        *("True", "False", "False"),
        "",
    )
    assert rows[2]["error"] == "HTTP 500: no"
    assert float(rows[1]["latency_s"]) == 4.0


def test_the_chrome_trace_has_a_row_per_worker_and_a_slice_per_stage() -> None:
    events = make_chrome_trace(RESULTS)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == ["w2", "w3", "w10"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(names[event["tid"]], event["cat"], event["ts"], event["dur"]) for event in slices] == [
        ("w10", "encode", 0, 100_000),
        ("w2", "diffuse", 200_000, 500_000),
        ("w3", "diffuse", 200_000, 500_000),
        ("w2", "diffuse", 800_000, 500_000),
        ("w2", "decode", 1_300_000, 100_000),
    ]
    assert slices[1]["args"] == {
        "request_id": "0",
        "service_request_id": "run-0",
        "stage": "diffuse",
        "degree": 2,
        "size": "64x48",
        "steps": 2,
        "model": "tiny",
        "start_s": 0.2,
        "end_s": 0.7,
    }
    arrows = [(event["ph"], names[event["tid"]], event["ts"]) for event in events if event["name"] == "handoff"]
    assert arrows == [("s", "w10", 99_999), ("f", "w2", 200_000)]


TIMES = st.floats(1.7e9, 1.7e9 + 10)
WORKERS = st.sampled_from([("w1",), ("w2",), ("w2", "w1"), ("w3", "w10")])


@given(st.lists(st.lists(st.tuples(WORKERS, TIMES, st.floats(-1e-3, 10)), max_size=5), max_size=4))
def test_the_chrome_trace_is_well_formed(requests: list[list[tuple[tuple[str, ...], float, float]]]) -> None:
    """Even where clocks have it that stages of one worker overlap, or end before they begin."""
    results = [
        result(
            index,
            1.0,
            timeline=tuple(span("diffuse", workers, start_s, start_s + long_s) for workers, start_s, long_s in stages),
        )
        for index, stages in enumerate(requests)
    ]
    trace = json.loads(json.dumps(make_chrome_trace(results)))
    check_trace_events(trace)
    drawn = sum(event["ph"] == "X" for event in trace["traceEvents"])
    assert drawn == sum(len(workers) for stages in requests for workers, _, _ in stages)


def check_trace_events(trace: dict[str, Any]) -> None:
    """The rules of the Trace Event Format that viewers hold files to."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    named: set[tuple[int, int]] = set()
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        row = (event["pid"], event["tid"])
        if event["ph"] == "M":
            assert set(event["args"]) in ({"name"}, {"sort_index"})
            named |= {row} if event["name"] == "thread_name" else set()
        elif event["ph"] == "X":
            assert isinstance(event["ts"], int)
            assert event["dur"] >= 0
            rows[row].append((event["ts"], event["ts"] + event["dur"]))
        else:
            arrows[event["id"]].append(event)
    assert set(rows) == named, "each row is named and none is empty"
    for slices in rows.values():
        for (_, before), (after, _) in zip(sorted(slices), sorted(slices)[1:], strict=False):
            assert before <= after, "slices of a row do not overlap"
    for pair in arrows.values():
        assert [event["ph"] for event in pair] == ["s", "f"]
        assert pair[1]["bp"] == "e", "the end binds to the slice that is open there"
        for event in pair:
            slices = rows[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in slices), "an arrow is tied to a slice"
