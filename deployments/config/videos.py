"""The section of the configuration about video jobs: where they are kept, for how long, and how many at once."""

from __future__ import annotations

from pydantic import Field, field_validator

from deployments.config.base import Args, LocalPath, config_error

_LEAST_LEASE_S = 1.0


class VideosArgs(Args):
    """Jobs of `POST /v1/videos`, and their files (docs/api.md)."""

    data_dir: LocalPath | None = Field(
        default=None, description="folder of the jobs and their files, on a disk; None: `videos` in `cache_dir`"
    )
    results_url: str | None = Field(
        default=None, description="fsspec URL to keep the files at, such as `s3://bucket/videos`; None: in `data_dir`"
    )
    retention_s: float = Field(default=86_400, gt=0, description="how long an ended job and its files are kept")
    max_results_mb: int = Field(
        default=10_240,
        ge=1,
        description="MiB of all files, the oldest go first; and of the pictures that jobs wait with",
    )
    max_unfinished: int = Field(default=1000, ge=1, description="jobs that have not ended; the next one gets 429")
    max_in_flight: int = Field(
        default=64,
        ge=1,
        description="given to the scheduler at once, with at most 256 MiB of pictures; the others wait by priority",
    )
    lease_s: float = Field(
        default=10, ge=_LEAST_LEASE_S, description="after which the jobs of a process that died are taken over"
    )
    max_attempts: int = Field(default=5, ge=1, description="of a job during which the service ended")

    @field_validator("results_url")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is not None and "://" not in url:
            raise config_error("", "give a URL with a protocol, such as s3://bucket/videos, or leave it out")
        return url
