"""The services behind the HTTP routes and the Python handle, as protocols."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tridentserve.engine.live.updates import CompletedUpdate, FailedUpdate, StreamedUpdate, Update
from tridentserve.errors import TridentServeError, make_error
from tridentserve.models.lora_files import LoraFile
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling.events import Reject
from tridentserve.scheduling.prediction.predictor import Quote
from tridentserve.scheduling.watching.cluster_state import ClusterState

U = TypeVar("U")


class Backend(Protocol):
    """The service that runs requests. Every error that it raises on purpose is a `TridentServeError`."""

    def generate(
        self, spec: RequestSpec, inputs: GenerationInputs, with_progress: bool = True
    ) -> AsyncIterator[Update]:
        """The updates of one request; the last one is a `CompletedUpdate` or a `FailedUpdate`. Without `with_progress`
        there may be no others, which costs less.

        A client that has left closes the iterator early, or cancels the task that waits for it.
        A request that the service refuses raises before the first update (an `OverloadedError`, for example).
        """

    async def cancel(self, request_id: str) -> bool:
        """Stop a request. The result is False when the request is unknown or has ended."""

    async def quote(self, specs: Sequence[RequestSpec]) -> list[Quote | Reject | None]:
        """The prediction for each of these requests, if it alone came now; its refusal where it could never run; None
        where nothing can be predicted. Nothing is started."""

    async def get_health(self) -> dict[str, Any]:
        """The state of the service as `GET /health` answers it: "status" is "ready", "degraded" (some workers are
        missing) or another word for a service that cannot take requests, "workers" is the number of ready workers."""

    async def add_lora(self, model: str, name: str, path: str) -> LoraFile:
        """Offer the LoRA of a file by this name, once it has been read on every node and fits the model. Raises
        `InvalidRequestError`, `LoraExistsError`, `UnknownModelError` and `ModelUnavailableError`."""

    async def remove_lora(self, model: str, name: str) -> None:
        """Offer a LoRA no more. Requests that have been accepted keep it. Raises `LoraNotFoundError` and
        `UnknownModelError`."""

    async def explain(self, request_id: str) -> dict[str, Any]:
        """Why a request ended when it did, as `tridentserve.scheduling.explanation.explanation.to_plain` has it. Raises
        `RequestNotFoundError` for one that is not among the latest."""

    async def describe_cluster(self, cursor: tuple[int, ...]) -> ClusterState:
        """The state of the cluster, with what has ended since the state with this `cursor`; with an empty one, of the
        last minute. Raises a `TridentServeError` when no scheduler answers."""


class VideoBackend(Protocol):
    """The service that keeps video jobs. A job is described as `deployments.videos.view.describe_job` does.

    All methods but `submit` and `page` raise `RequestNotFoundError` for an id that no job has."""

    async def submit(self, spec: RequestSpec, inputs: GenerationInputs, priority: int) -> dict[str, Any]:
        """Create a job, which outlives this process, or join the job with this id.

        Raises `InvalidRequestError` for an id that was used for another request, `OverloadedError`, and
        `VideoStorageError` when the disk is full."""

    async def get(self, job_id: str) -> dict[str, Any]:
        """Describe one job."""

    async def list_page(self, after: str | None, limit: int, newest_first: bool) -> tuple[list[dict[str, Any]], bool]:
        """Up to `limit` jobs that follow the job `after` (all jobs if None), and True if more jobs follow them."""

    async def delete(self, job_id: str) -> None:
        """Stop a job at its next step, which leaves it failed; or remove a job that has ended, with its files."""

    async def cancel(self, job_id: str) -> bool:
        """Stop a job at its next step, which leaves it failed. The result is False for a job that has ended."""

    async def find_local_file(self, job_id: str, index: int) -> Path | None:
        """The path of one video of a completed job, or None when the file is not on this machine.

        Raises `RequestNotFoundError` when there is no such video."""

    async def read_content(self, job_id: str, index: int) -> bytes:
        """The MP4 file of one video. Raises as `find_local_file` does."""


@asynccontextmanager
async def closing(updates: AsyncIterator[U]) -> AsyncIterator[AsyncIterator[U]]:
    """Closes the updates at the end in any case: like `contextlib.aclosing`, for iterators with or without `aclose`."""
    try:
        yield updates
    finally:
        aclose = getattr(updates, "aclose", None)
        if aclose is not None:
            await aclose()


async def raise_failure(updates: AsyncIterator[Update]) -> AsyncIterator[StreamedUpdate]:
    """The updates up to the `CompletedUpdate`. Raises the error of a `FailedUpdate`; closes `updates` in any case."""
    async with closing(updates):
        async for update in updates:
            if isinstance(update, FailedUpdate):
                raise make_error(update.code, update.message, update.param, update.predicted_s)
            yield update
            if isinstance(update, CompletedUpdate):
                return
    raise TridentServeError("the request ended without a result")


async def wait_for_result(updates: AsyncIterator[Update]) -> CompletedUpdate:
    """The last update; closes the iterator. Raises the error of a `FailedUpdate`."""
    async with closing(raise_failure(updates)) as checked:
        completed = [update async for update in checked if isinstance(update, CompletedUpdate)]
    return completed[0]
