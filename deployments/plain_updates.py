"""Updates of a request as plain dicts, the form that callers of the Python handle get:

    {"type": "queued", "request_id", "queue_position", "eta_s"}
    {"type": "progress", "request_id", "step", "num_steps", "queue_position", "eta_s"}
    {"type": "partial_image", "request_id", "partial_image_index", "step", "num_steps", "output_format",
     "images": [bytes of files]}
    {"type": "completed", "request_id", "model", "images": [bytes of files], "seed", "width", "height", "created",
     "queue_s", "latency_s", "slo_s", "slo_met", "retries", "stage_durations": {"encode", "diffuse", "decode"},
     "timeline": [{"stage", "workers", "degree", "start_s", "end_s", "steps"}], "peak_memory_mb", "tiled",
     "predicted_s", "reduced_steps", "quality", "skipped_steps"}

A completed video has "videos": [MP4 bytes] or "frames": [(frames, height, width, 3) uint8] instead of "images", and
"num_frames" and "fps" in addition. Beside the "frames" of a video with sound stand "sounds": [(channels, samples)
float32] and "sampling_rate". A failed request raises an error instead. HTTP answers have the facts of these
dicts, but hold images as base64 (`deployments.http.routes.image_routes`, `deployments.http.sse`) and a video as the
file itself.
"""

from __future__ import annotations

from typing import Any

from tridentserve.byte_sizes import MIB
from tridentserve.engine.live.updates import (
    CompletedUpdate,
    PreviewUpdate,
    ProgressUpdate,
    QueuedUpdate,
    StreamedUpdate,
)
from tridentserve.models.decoded_outputs import SoundVideo
from tridentserve.plans import StageSpan
from tridentserve.requests import OutputFormat

# The key under which the outputs of a completed request stand.
_OUTPUT_KEYS: dict[OutputFormat, str] = {
    "png": "images",
    "jpeg": "images",
    "webp": "images",
    "mp4": "videos",
    "frames": "frames",
}


def to_plain(update: StreamedUpdate) -> dict[str, Any]:
    """The plain form of an update."""
    match update:
        case QueuedUpdate():
            return {"type": "queued", "request_id": update.request_id, **_describe_prospect(update)}
        case ProgressUpdate():
            steps = {"step": update.step, "num_steps": update.num_steps, **_describe_prospect(update)}
            return {"type": "progress", "request_id": update.request_id, **steps}
        case PreviewUpdate():
            return {
                "type": "partial_image",
                "request_id": update.request_id,
                "partial_image_index": update.index,
                "step": update.step,
                "num_steps": update.num_steps,
                "output_format": update.output_format,
                "images": list(update.images),
            }
        case CompletedUpdate():
            return {"type": "completed", **_describe_result(update)}


def _describe_prospect(update: QueuedUpdate | ProgressUpdate) -> dict[str, Any]:
    return {"queue_position": update.queue_position, "eta_s": update.eta_s}


def _describe_result(update: CompletedUpdate) -> dict[str, Any]:
    video = {} if update.fps is None else {"num_frames": update.shape.num_frames, "fps": update.fps}
    return {
        "request_id": update.request_id,
        "model": update.model,
        **_describe_outputs(update),
        "seed": update.seed,
        "width": update.shape.width,
        "height": update.shape.height,
        "created": update.created_s,
        "queue_s": update.queue_s,
        "latency_s": update.latency_s,
        "slo_s": update.slo_s,
        "slo_met": update.slo_met,
        "retries": update.retries,
        "stage_durations": update.stage_durations_s,
        "timeline": [_describe_span(span) for span in update.timeline],
        "peak_memory_mb": update.peak_memory_bytes / MIB,
        "tiled": update.tiled,
        "predicted_s": update.predicted_s,
        "reduced_steps": update.reduced_steps,
        "quality": update.quality,
        "skipped_steps": update.skipped_steps,
        **video,
    }


def _describe_outputs(update: CompletedUpdate) -> dict[str, Any]:
    key, outputs = _OUTPUT_KEYS[update.output_format], list(update.outputs)
    videos = [output for output in outputs if isinstance(output, SoundVideo)]
    if not videos:
        return {key: outputs}
    return {
        key: [video.frames for video in videos],
        "sounds": [video.sound.samples for video in videos],
        "sampling_rate": videos[0].sound.sampling_rate,
    }


def _describe_span(span: StageSpan) -> dict[str, Any]:
    return {
        "stage": span.stage.value,
        "workers": list(span.workers),
        "degree": len(span.workers),
        "start_s": span.start_s,
        "end_s": span.end_s,
        "steps": span.steps,
    }
