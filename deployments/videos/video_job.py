"""A video job as the database holds it, and how it is read from a row."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import TypeAdapter

from tridentserve.requests import GenerationInputs, RequestSpec

JobState = Literal["queued", "leased", "completed", "failed"]

_SPEC, _INPUTS = TypeAdapter(RequestSpec), TypeAdapter(GenerationInputs)


@dataclass(frozen=True, slots=True)
class VideoJob:
    """A job as it is stored. Its times are seconds of the Unix clock."""

    number: int
    """Position in the order in which jobs were submitted; unique, also where an id is used again."""
    job_id: str
    state: JobState
    priority: int
    """The queued job with the highest priority is leased first."""
    spec: RequestSpec
    inputs: GenerationInputs
    """The content of the request, without its input image."""
    created_s: float
    attempts: int
    """Number of leases of the job that have begun."""
    steps_done: int
    """Denoising steps that were done when the lease was last renewed."""
    ended_s: float | None
    result: dict[str, Any] | None
    """Facts about a completed job, in addition to those of the request."""
    error: dict[str, Any] | None
    """The error of a failed job, in OpenAI's form."""
    image_sha256: str | None
    """The digest of the input image, None for a job without one."""

    @property
    def file_name(self) -> str:
        """The name of the job's files, without index and suffix."""
        return make_file_name(self.job_id, self.number)


def make_file_name(job_id: str, number: int) -> str:
    """The name of a job's files, which is unique also where an id is used again."""
    return f"{job_id}-{number}"


def write_request(spec: RequestSpec, inputs: GenerationInputs) -> tuple[str, str]:
    """The two halves of a request as JSON, as `read_job` reads them."""
    return _SPEC.dump_json(spec).decode(), _INPUTS.dump_json(inputs).decode()


def read_job(row: sqlite3.Row) -> VideoJob:
    """The job in a row with all columns of the table of jobs."""
    return VideoJob(
        number=row["number"],
        job_id=row["id"],
        state=row["state"],
        priority=row["priority"],
        spec=_SPEC.validate_json(row["spec"]),
        inputs=_INPUTS.validate_json(row["inputs"]),
        created_s=row["created_s"],
        attempts=row["attempts"],
        steps_done=row["steps_done"],
        ended_s=row["ended_s"],
        result=None if row["result"] is None else json.loads(row["result"]),
        error=None if row["error"] is None else json.loads(row["error"]),
        image_sha256=row["image_sha256"],
    )


def is_same(job: VideoJob, spec: RequestSpec, inputs: GenerationInputs, image_sha256: str | None) -> bool:
    """Compare a job with a request. A client that leaves the seed to the service accepts any seed of the job."""
    same_inputs = job.inputs == (replace(inputs, seed=job.inputs.seed) if inputs.seed_drawn else inputs)
    return job.spec == spec and same_inputs and job.image_sha256 == image_sha256
