"""A video job as clients see it."""

from __future__ import annotations

from typing import Any

from deployments.videos.video_job import VideoJob


def describe_job(
    job: VideoJob, steps_done: int, retention_s: float, prospects: tuple[int | None, float | None] = (None, None)
) -> dict[str, Any]:
    """OpenAI's video object, and in addition all that is known of the job: of one that has not ended also its
    `prospects`, the position in the queue and the seconds that are left. The HTTP routes add its `url`."""
    shape, fps = job.spec.shape, job.inputs.fps or 1.0
    view: dict[str, Any] = {
        "id": job.job_id,
        "object": "video",
        "status": _choose_status(job, steps_done),
        "progress": _compute_percent(job, steps_done),
        "created_at": int(job.created_s),
        "completed_at": None,
        "expires_at": None,
        "error": job.error,
        "model": job.spec.model,
        "prompt": job.inputs.prompt,
        "size": f"{shape.width}x{shape.height}",
        "seconds": f"{shape.num_frames / fps:g}",
        "num_frames": shape.num_frames,
        "fps": int(fps) if fps == int(fps) else fps,
        "num_outputs": job.spec.num_outputs,
        "num_inference_steps": job.spec.num_inference_steps,
        "seed": job.inputs.seed,
        "priority": job.priority,
        "request_id": job.job_id,
    }
    if job.ended_s is None:
        view["queue_position"], view["eta_s"] = prospects
    if job.ended_s is not None:
        view["expires_at"] = int(job.ended_s + retention_s)
    if job.state == "completed" and job.ended_s is not None and job.result is not None:
        view |= job.result
        view["completed_at"] = int(job.ended_s)
        view["inference_time_s"] = job.result.get("latency_s")
    return view


def _choose_status(job: VideoJob, steps_done: int) -> str:
    """The status that clients see: a job that waits in the scheduler is queued too."""
    if job.state == "leased":
        return "in_progress" if steps_done else "queued"
    return job.state


def _compute_percent(job: VideoJob, steps_done: int) -> int:
    """Completed steps over all steps, in percent; 100 only when there is a video."""
    if job.state == "completed":
        return 100
    return min(99, 100 * steps_done // job.spec.num_inference_steps)
