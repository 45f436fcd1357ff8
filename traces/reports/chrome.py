"""A replay as a Chrome trace: one row per worker, one slice per stage. Open it in Perfetto or chrome://tracing.

Format: the "Trace Event Format" of the Chromium project, JSON object form.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any

from traces.results import ReplayResult, TimelineEntry

TraceEvent = dict[str, Any]
_PID = 1


def make_chrome_trace(results: Sequence[ReplayResult], service: str = "tridentserve") -> dict[str, Any]:
    """The trace as a JSON-able object; time 0 is the start of the earliest stage, times are whole microseconds.

    A stage of degree k is a slice on the rows of its k workers. Arrows lead from a stage to the next one of the same
    request where that begins on another worker.
    """
    spans = [span for result in results for span in result.facts.timeline]
    zero_s = min((span.start_s for span in spans), default=0.0)
    workers = sorted({worker for span in spans for worker in span.workers}, key=_natural_order)
    rows = {worker: row for row, worker in enumerate(workers, start=1)}
    events = [_make_metadata("process_name", service)]
    for worker, row in rows.items():
        events += [_make_metadata("thread_name", worker, row), _make_metadata("thread_sort_index", row, row)]
    drawn = [
        [
            _make_slices(result, span, rows, zero_s)
            for span in sorted(result.facts.timeline, key=lambda span: span.start_s)
        ]
        for result in results
    ]
    events += _remove_overlaps([one for stages in drawn for workers in stages for one in workers])
    arrow_ids = count(1)
    for stages in drawn:
        for (before, *_), (after, *_) in pairwise(stages):
            if before["tid"] != after["tid"]:
                events += _make_arrow(before, after, next(arrow_ids))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _natural_order(worker: str) -> tuple[int, str]:
    """A sort key that puts worker-10 after worker-9."""
    return len(worker), worker


def _make_metadata(name: str, value: str | int, row: int = 0) -> TraceEvent:
    key = "sort_index" if name.endswith("sort_index") else "name"
    return {"ph": "M", "name": name, "pid": _PID, "tid": row, "args": {key: value}}


def _make_slices(result: ReplayResult, span: TimelineEntry, rows: dict[str, int], zero_s: float) -> list[TraceEvent]:
    """One per worker, the first worker's first."""
    start_us = round((span.start_s - zero_s) * 1e6)
    end_us = max(start_us, round((span.end_s - zero_s) * 1e6))
    request = result.request
    common: TraceEvent = {
        "ph": "X",
        "name": f"{span.stage} {request.request_id}",
        "cat": span.stage,
        "pid": _PID,
        "ts": start_us,
        "dur": end_us - start_us,
        "args": {
            "request_id": request.request_id,
            "service_request_id": result.service_request_id,
            "stage": span.stage,
            "degree": span.degree,
            "size": f"{request.width}x{request.height}",
            "steps": span.steps,
            "model": result.model,
            "start_s": start_us / 1e6,
            "end_s": end_us / 1e6,
        },
    }
    return [{**common, "tid": rows[worker]} for worker in span.workers]


def _remove_overlaps(slices: list[TraceEvent]) -> list[TraceEvent]:
    """Viewers drop a slice that begins before the one ahead of it in its row has ended. A few microseconds do that: the
    end of a stage is timed by its first worker only. Such a slice is drawn from where the one ahead ends; its true
    times stand in its args."""
    free_us: dict[int, int] = {}
    for one in sorted(slices, key=lambda one: (one["ts"], one["ts"] + one["dur"])):
        end_us = max(one["ts"] + one["dur"], free_us.get(one["tid"], 0))
        one["ts"] = max(one["ts"], free_us.get(one["tid"], 0))
        one["dur"] = end_us - one["ts"]
        free_us[one["tid"]] = end_us
    return slices


def _make_arrow(before: TraceEvent, after: TraceEvent, arrow_id: int) -> list[TraceEvent]:
    # An arrow is tied to the slice that is open at its time, so it leaves just before the end of the earlier stage.
    common = {"name": "handoff", "cat": "handoff", "id": arrow_id, "pid": _PID}
    leaves_us = before["ts"] + max(0, before["dur"] - 1)
    return [
        {**common, "ph": "s", "tid": before["tid"], "ts": leaves_us},
        {**common, "ph": "f", "bp": "e", "tid": after["tid"], "ts": after["ts"]},
    ]
