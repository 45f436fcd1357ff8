"""The report of a replay, live or simulated: the figures that users compare, one row per request, a Chrome trace."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from traces.reports.chrome import make_chrome_trace
from traces.results import ReplayResult
from tridentserve.stages import Stage


def replay_duration_s(results: Sequence[ReplayResult]) -> float:
    """Seconds from the start of the replay until the last request ended."""
    return max((result.sent_s + result.latency_s for result in results), default=0.0)


def summarize(results: Sequence[ReplayResult], duration_s: float) -> dict[str, Any]:
    """The figures of a replay as a JSON-able dict. Times are seconds; a figure without data is None.

    Latencies, stage times and memory are those of completed requests. SLO attainment is the share of the requests with
    a deadline that met it. A failed request is a miss: once any request has a deadline, every failure counts as having
    had one, because a service that sets deadlines itself tells them only in answers.
    """
    completed = [result for result in results if result.error is None]
    failed = [result for result in results if result.error is not None]
    latencies = [result.latency_s for result in completed]
    slo_met = sum(result.slo_met is True for result in results)
    slo_missed = sum(result.slo_met is False or (result.error is not None) for result in results)
    has_deadlines = any(result.slo_met is not None for result in results)
    lateness = [result.send_lateness_s for result in results]
    memory = [result.facts.peak_memory_mb for result in completed if result.facts.peak_memory_mb is not None]
    queue = [result.facts.queue_s for result in completed if result.facts.queue_s is not None]
    return {
        "duration": duration_s,
        "completed_requests": len(completed),
        "failed_requests": len(failed),
        "oom_requests": sum(result.out_of_memory for result in failed),
        "refused_requests": sum(result.refused for result in failed),
        "degraded_requests": sum(result.degraded for result in completed),
        "throughput_qps": len(completed) / duration_s if duration_s > 0 else None,
        **_compute_statistics("latency", latencies, (50, 95, 99)),
        "latency_median": compute_percentile(latencies, 50),
        "slo_attainment_rate": slo_met / (slo_met + slo_missed) if has_deadlines else None,
        "slo_met_success": slo_met,
        "peak_memory_mb": max(memory, default=None),
        **_compute_stage_statistics(completed),
        "queue_mean": fmean(queue) if queue else None,
        **_measure_predictions(completed),
        "send_lateness_p99": compute_percentile(lateness, 99),
        "send_lateness_max": max(lateness, default=None),
        "diffuse_degrees": _diffuse_degrees(completed),
        "errors": dict(Counter(str(result.error) for result in failed).most_common(5)),
    }


def _measure_predictions(completed: Sequence[ReplayResult]) -> dict[str, float | None]:
    """The quality of the predictions of latencies, where the service made any: the median of predicted over actual
    seconds, and the shares of the requests whose prediction was within 10 and 30 % of its true latency."""
    pairs = [(result.facts.predicted_s, result.facts.latency_s or result.latency_s) for result in completed]
    ratios = [predicted_s / actual_s for predicted_s, actual_s in pairs if predicted_s is not None and actual_s > 0]
    shares = {
        f"predicted_within_{percent}": sum(abs(ratio - 1) <= percent / 100 for ratio in ratios) / len(ratios)
        if ratios
        else None
        for percent in (10, 30)
    }
    return {"predicted_requests": len(ratios), "prediction_ratio_p50": compute_percentile(ratios, 50), **shares}


def compute_percentile(values: Sequence[float], percent: float) -> float | None:
    """Interpolated linearly between the nearest ranks, as numpy does by default; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def _compute_statistics(prefix: str, values: Sequence[float], percents: Sequence[int]) -> dict[str, float | None]:
    figures = {f"{prefix}_mean": fmean(values) if values else None}
    return figures | {f"{prefix}_p{percent}": compute_percentile(values, percent) for percent in percents}


def _compute_stage_statistics(completed: Sequence[ReplayResult]) -> dict[str, dict[str, float | None]]:
    """`stage_durations_mean`, `_p50` and `_p99`: each a dict from stage to seconds."""
    by_stage: dict[str, list[float]] = {}
    for result in completed:
        for stage, seconds in result.facts.stage_durations.items():
            by_stage.setdefault(stage, []).append(seconds)
    figures: dict[str, dict[str, float | None]] = {f"stage_durations_{name}": {} for name in ("mean", "p50", "p99")}
    for stage, values in by_stage.items():
        for name, value in _compute_statistics("stage_durations", values, (50, 99)).items():
            figures[name][stage] = value
    return figures


def _diffuse_degrees(completed: Sequence[ReplayResult]) -> dict[str, int]:
    """The number of diffuse plans that ran at each degree, lowest first (keys are text: it is JSON)."""
    degrees = Counter(
        span.degree for result in completed for span in result.facts.timeline if span.stage == Stage.DIFFUSE
    )
    return {str(degree): plans for degree, plans in sorted(degrees.items())}


def write_report(folder: Path, results: Sequence[ReplayResult], service: str = "tridentserve") -> dict[str, Any]:
    """Writes `summary.json`, `requests.csv` and `trace.json` into `folder` (made if needed); returns the summary.

    `service` names what answered in the Chrome trace: an address, or the cluster that was simulated.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = summarize(results, replay_duration_s(results))
    (folder / "summary.json").write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "trace.json").write_text(json.dumps(make_chrome_trace(results, service)), encoding="utf-8")
    with (folder / "requests.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(_COLUMNS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(_request_row(result) for result in results)
    return figures


_COLUMNS = (
    *("request_id", "service_request_id", "model", "timestamp_s"),
    *("width", "height", "num_frames", "num_inference_steps", "on_late", "priority"),
    *("sent_s", "send_lateness_s", "latency_s", "status", "error", "slo_s", "slo_met", "queue_s"),
    *(f"{stage.value}_s" for stage in Stage),
    *(f"{stage.value}_workers" for stage in Stage),
    *("peak_memory_mb", "reduced_steps", "quality"),
)


def _request_row(result: ReplayResult) -> dict[str, object]:
    """Workers are given as `w0+w1`; the parts of a stage that was stopped and resumed are separated by blanks."""
    request, facts = result.request, result.facts
    row: dict[str, object] = {
        "request_id": request.request_id,
        "service_request_id": result.service_request_id,
        "model": result.model,
        "timestamp_s": request.timestamp_s,
        "width": request.width,
        "height": request.height,
        "num_frames": request.num_frames,
        "num_inference_steps": request.num_inference_steps,
        "on_late": request.on_late,
        "priority": request.priority,
        "sent_s": f"{result.sent_s:.6f}",
        "send_lateness_s": f"{result.send_lateness_s:.6f}",
        "latency_s": f"{result.latency_s:.6f}",
        "status": result.status,
        "error": result.error,
        "slo_s": result.slo_s,
        "slo_met": result.slo_met,
        "queue_s": facts.queue_s,
        "peak_memory_mb": facts.peak_memory_mb,
        "reduced_steps": facts.reduced_steps,
        "quality": facts.quality,
    }
    for stage in Stage:
        spans = [span for span in facts.timeline if span.stage == stage]
        row[f"{stage.value}_s"] = facts.stage_durations.get(stage.value)
        row[f"{stage.value}_workers"] = " ".join("+".join(span.workers) for span in spans)
    return row


def format_summary(figures: dict[str, Any]) -> str:
    """The summary for people, one figure a line."""

    def text(key: str, unit: str = "", digits: int = 3) -> str:
        value = figures[key]
        return "-" if value is None else f"{value:.{digits}f}{unit}"

    attainment = figures["slo_attainment_rate"]
    stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in figures["stage_durations_mean"].items())
    degrees = ", ".join(f"{plans} at {degree}" for degree, plans in figures["diffuse_degrees"].items())
    lines = [
        ("completed / failed", f"{figures['completed_requests']} / {figures['failed_requests']}"),
        ("failed out of memory", str(figures["oom_requests"])),
        ("refused / degraded", f"{figures['refused_requests']} / {figures['degraded_requests']}"),
        ("duration", text("duration", " s", 1)),
        ("throughput", text("throughput_qps", " requests/s")),
        ("latency mean", text("latency_mean", " s")),
        ("latency p50 p95 p99", " ".join(text(f"latency_p{percent}") for percent in (50, 95, 99)) + " s"),
        ("SLO attainment", "-" if attainment is None else f"{attainment:.1%} ({figures['slo_met_success']} met)"),
        ("stage means", f"{stages} s" if stages else "-"),
        ("diffuse degrees", degrees or "-"),
        ("largest send lateness", text("send_lateness_max", " s")),
    ]
    lines += [("failed with", f"{number} x {error}") for error, number in figures["errors"].items()]
    return "\n".join(f"{name:22} {value}" for name, value in lines)
