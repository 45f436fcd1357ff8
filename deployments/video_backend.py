"""What the HTTP routes need of the service that keeps video jobs, as a protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from tridentserve.requests import GenerationInputs, RequestSpec


class VideoBackend(Protocol):
    """Video jobs. A job is told as `deployments.videos.view.video_view` does. All but `submit` and `page` raise
    `RequestNotFoundError` for an id that no job has."""

    async def submit(self, spec: RequestSpec, inputs: GenerationInputs, priority: int) -> dict[str, Any]:
        """Take in a job, which outlives this service; or join the one with this id.

        Raises `InvalidRequestError` for an id that was used for another request, `OverloadedError`, and
        `VideoStorageError` when the disk is full."""

    async def get(self, job_id: str) -> dict[str, Any]:
        """One job."""

    async def page(self, after: str | None, limit: int, newest_first: bool) -> tuple[list[dict[str, Any]], bool]:
        """Up to `limit` jobs, from the one behind `after` on; and whether there are more."""

    async def delete(self, job_id: str) -> None:
        """Stop a job at its next step, which leaves it failed; or remove one that has ended, with its files."""

    async def cancel(self, job_id: str) -> bool:
        """Stop a job as `delete` does. False for one that has ended, which stays."""

    async def local_file(self, job_id: str, index: int) -> Path | None:
        """Where a video of a completed job lies on this machine; None where it does not. Raises
        `RequestNotFoundError` when there is no such video."""

    async def content(self, job_id: str, index: int) -> bytes:
        """The MP4 file. Raises as `local_file` does."""
