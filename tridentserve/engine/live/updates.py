"""The updates a client of a request sees: plain dicts, so that callers need no import of ours."""

from __future__ import annotations

from typing import Any

from tridentserve.errors import http_status_of
from tridentserve.requests import GenerationInputs, OutputFormat
from tridentserve.scheduling.request_records import RequestRecord

Update = dict[str, Any]
# Under which key the outputs of a request stand.
_OUTPUTS: dict[OutputFormat, str] = {"png": "images", "mp4": "videos", "frames": "frames"}


def queued(request_id: str) -> Update:
    """The first update: the request has been taken in."""
    return {"type": "queued", "request_id": request_id}


def progress(request_id: str, step: int, num_steps: int) -> Update:
    """`step` of `num_steps` denoising steps are done. Falls back to 0 when a request starts again."""
    return {"type": "progress", "request_id": request_id, "step": step, "num_steps": num_steps}


def failed(request_id: str, code: str, message: str, param: str | None = None) -> Update:
    """The last update of a request without a result, with the error in OpenAI's form."""
    status = http_status_of(code)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return {"type": "failed", "request_id": request_id, "error": error, "http_status": status}


def completed(
    request_id: str,
    record: RequestRecord,
    inputs: GenerationInputs,
    images: list[Any],
    peak_memory_bytes: int,
    tiled: bool,
    clock_offset_s: float,
) -> Update:
    """The last update of a request with a result. `images` are its outputs (PNG or MP4 files, arrays of frames), or
    references to them inside the cluster. Times of the timeline are in seconds of the Unix clock (scheduler time +
    `clock_offset_s`)."""
    timeline = [
        {
            "stage": run.stage.value,
            "workers": list(run.workers),
            "degree": len(run.workers),
            "start_s": run.start_s + clock_offset_s,
            "end_s": run.end_s + clock_offset_s,
            "steps": run.steps,
        }
        for run in record.timeline
    ]
    return {
        "type": "completed",
        "request_id": request_id,
        "model": record.spec.model,
        _OUTPUTS[inputs.output_format]: images,
        "seed": inputs.seed,
        "width": record.spec.shape.width,
        "height": record.spec.shape.height,
        "created": int(record.arrival_s + clock_offset_s),
        "queue_s": record.queue_s,
        "latency_s": record.latency_s,
        "slo_s": record.slo_s,
        "slo_met": record.slo_met,
        "retries": record.retries,
        "stage_durations": record.stage_seconds(),
        "timeline": timeline,
        "peak_memory_mb": peak_memory_bytes / 2**20,
        "tiled": tiled,
        **({} if inputs.fps is None else {"num_frames": record.spec.shape.num_frames, "fps": inputs.fps}),
    }
