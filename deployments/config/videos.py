"""The section of the configuration about video jobs: where they are kept, for how long, and how many at once."""

from __future__ import annotations

from pydantic import Field, field_validator

from deployments.config.base import Args, LocalPath, make_config_error

_LEAST_LEASE_S = 1.0


class VideosArgs(Args):
    """Jobs of `POST /v1/videos`, and their files (docs/api.md)."""

    data_dir: LocalPath | None = Field(
        default=None,
        description="Directory of the jobs and their files, on a disk of the node on which `Videos` runs; without "
        "it `videos` in `cache_dir`.",
    )
    results_url: str | None = Field(
        default=None,
        description="fsspec URL at which the files are kept, such as `s3://bucket/videos` (install `s3fs`, `gcsfs`, "
        "...); without it they are in `data_dir`.",
    )
    retention_s: float = Field(
        default=86_400, gt=0, description="Time for which a job that has ended and its files are kept, in seconds."
    )
    max_results_mb: int = Field(
        default=10_240,
        ge=1,
        description="Most MiB that all files take; beyond that the oldest are deleted. Also the most MiB that the "
        "input images of waiting jobs take; a job beyond that gets status 429.",
    )
    max_unfinished: int = Field(
        default=1000, ge=1, description="Most jobs that have not ended; a further one gets status 429."
    )
    max_in_flight: int = Field(
        default=64,
        ge=1,
        description="Most jobs that the scheduler has at once, with at most 256 MiB of input images; the others wait "
        "by priority.",
    )
    lease_s: float = Field(
        default=10,
        ge=_LEAST_LEASE_S,
        description="Time after which the jobs of a process that died are taken over, in seconds.",
    )
    max_attempts: int = Field(default=5, ge=1, description="Most attempts at a job during which the service ended.")

    @field_validator("results_url")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is not None and "://" not in url:
            raise make_config_error("", "give a URL with a protocol, such as s3://bucket/videos, or leave it out")
        return url
