"""The updates that a client of one request gets, in this order: a `QueuedUpdate`, which comes again with other
prospects while the request waits, any number of `ProgressUpdate` and `PreviewUpdate`, and at the end one
`CompletedUpdate` or one `FailedUpdate`.

The service turns them into the forms that clients see (JSON, plain dicts, OpenAI's errors) at its outer edge only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tridentserve.engine.live.channels.compact_pickles import pickle_by_fields
from tridentserve.plans import StageSpan
from tridentserve.requests import OutputFormat, Quality, Shape


@dataclass(frozen=True, slots=True)
class QueuedUpdate:
    """The request has been accepted, and waits."""

    request_id: str
    queue_position: int | None = None
    """Number of requests that wait and go before it; None as long as that is not known."""
    eta_s: float | None = None
    """Seconds until it is predicted to end; None as long as nothing is predicted."""


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """A denoising step has ended."""

    request_id: str
    step: int
    """Denoising steps that are done. The number falls when the request resumes from an earlier state."""
    num_steps: int
    """Denoising steps that the request asks for."""
    queue_position: int | None = None
    """See `QueuedUpdate`; 0 while it runs."""
    eta_s: float | None = None
    """See `QueuedUpdate`."""


@dataclass(frozen=True, slots=True)
class PreviewUpdate:
    """Small pictures of the outputs as they are predicted to become, for a client that asks for them."""

    request_id: str
    index: int
    """Previews of the request before this one."""
    step: int
    """Denoising steps that were done. The number never falls: a request that resumes from an earlier state has no new
    preview until it is further than before."""
    num_steps: int
    """Denoising steps that the request asks for."""
    images: tuple[bytes, ...]
    """A file for each output, of the size of its latents."""
    output_format: OutputFormat
    """Format of the files: that of the result, and PNG where it is a video."""


@dataclass(frozen=True, slots=True)
class CompletedUpdate:
    """The request has ended with a result."""

    request_id: str
    model: str
    outputs: tuple[Any, ...]
    """PNG files, MP4 files or arrays of frames (see `output_format`), with sound a `SoundVideo` each; or references to
    them inside the cluster."""
    output_format: OutputFormat
    seed: int
    shape: Shape
    """Size of each output."""
    created_s: int
    """Time of arrival, in seconds of the Unix clock."""
    queue_s: float
    """Seconds from arrival to the start of the first stage."""
    latency_s: float | None
    """Seconds from arrival to the result."""
    slo_s: float | None
    """Seconds from arrival to the deadline."""
    slo_met: bool
    retries: int
    """Number of times that the request was put back into the queue."""
    stage_durations_s: dict[str, float]
    """Seconds per stage, by the stage's name."""
    timeline: tuple[StageSpan, ...]
    """Stages as they ran, in seconds of the Unix clock."""
    peak_memory_bytes: int
    """Largest memory that a worker used while it ran a plan of the request."""
    tiled: bool
    """The outputs were decoded in tiles, because memory was short."""
    predicted_s: float | None = None
    """Seconds from arrival to the result that were predicted at the arrival; None where nothing was."""
    fps: float | None = None
    """Frames per second of a video; None for an image."""
    quality: Quality = "exact"
    """The quality in which it was made."""
    skipped_steps: float = 0.0
    """The number of its denoising steps that took over what others had found. A step that only one of the two passes of
    guidance did without counts half."""
    reduced_steps: int | None = None
    """The number of denoising steps where it had fewer than were asked for (`on_late: degrade`); None where it had all
    of them."""


@dataclass(frozen=True, slots=True)
class FailedUpdate:
    """The request has ended without a result."""

    request_id: str
    code: str
    """Code of a class in `tridentserve.errors`."""
    message: str
    param: str | None = None
    """Field of the request that is at fault, if one is."""
    predicted_s: float | None = None
    """Seconds from arrival to the result that were predicted, where the request is refused because of that."""


StreamedUpdate = QueuedUpdate | ProgressUpdate | PreviewUpdate | CompletedUpdate
Update = StreamedUpdate | FailedUpdate

pickle_by_fields(QueuedUpdate, ProgressUpdate, PreviewUpdate, CompletedUpdate, FailedUpdate)
