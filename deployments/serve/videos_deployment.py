"""The Videos deployment: one replica, which keeps the video jobs and works them off; and the way to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ray import serve

from deployments.config.app import AppArgs, ModelArgs
from deployments.models.served import family_of
from deployments.serve.remote import RemoteBackend, our_errors
from deployments.videos.storage import local_file
from deployments.videos.worker import VideoJobs, results_url
from tridentserve.errors import CheckpointError, TridentServeError, WorkerError
from tridentserve.requests import GenerationInputs, RequestSpec

_MAX_ONGOING_REQUESTS = 10_000
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _or_error(method: Callable[_P, Awaitable[_T]]) -> Callable[_P, Awaitable[_T | TridentServeError]]:
    """Gives back what clients are to be told instead of raising it: Ray Serve would log it as a failure of ours."""

    @wraps(method)
    async def answer(*args: _P.args, **kwargs: _P.kwargs) -> _T | TridentServeError:
        try:
            return await method(*args, **kwargs)
        except TridentServeError as error:
            return error

    return answer


class Videos:
    """`VideoJobs` as a replica. When its process ends, the next one goes on with the jobs; they are in its folder."""

    def __init__(self, scheduler: Any, args: AppArgs) -> None:
        """`scheduler` is a `ray.serve.handle.DeploymentHandle`."""
        self._jobs = VideoJobs(RemoteBackend(scheduler), args.videos, data_dir(args))

    async def reconfigure(self, _: Any) -> None:
        """Ray Serve calls it before the first request, in the event loop that serves them."""
        await self._jobs.start()

    async def __del__(self) -> None:
        """Ray Serve calls it when the replica ends in order."""
        await self._jobs.stop()

    def check_health(self) -> None:
        if not self._jobs.healthy:
            raise WorkerError("video jobs are not worked off any more")

    @_or_error
    async def submit(self, spec: RequestSpec, inputs: GenerationInputs, priority: int) -> dict[str, Any]:
        return await self._jobs.submit(spec, inputs, priority)

    @_or_error
    async def get(self, job_id: str) -> dict[str, Any]:
        return await self._jobs.get(job_id)

    @_or_error
    async def page(self, after: str | None, limit: int, newest_first: bool) -> tuple[list[dict[str, Any]], bool]:
        return await self._jobs.page(after, limit, newest_first)

    @_or_error
    async def delete(self, job_id: str) -> None:
        await self._jobs.delete(job_id)

    @_or_error
    async def cancel(self, job_id: str) -> bool:
        return await self._jobs.cancel(job_id)

    @_or_error
    async def file_name(self, job_id: str, index: int) -> str:
        return await self._jobs.file_name(job_id, index)

    @_or_error
    async def content(self, job_id: str, index: int) -> bytes:
        return await self._jobs.content(job_id, index)


class RemoteVideos:
    """The Videos deployment as a `VideoBackend`, for another replica."""

    def __init__(self, videos: Any, args: AppArgs) -> None:
        """`videos` is a `ray.serve.handle.DeploymentHandle`."""
        self._handle = videos
        self._url = results_url(args.videos, data_dir(args))

    async def submit(self, spec: RequestSpec, inputs: GenerationInputs, priority: int) -> dict[str, Any]:
        return dict(await _answered(self._handle.submit.remote(spec, inputs, priority)))

    async def get(self, job_id: str) -> dict[str, Any]:
        return dict(await _answered(self._handle.get.remote(job_id)))

    async def page(self, after: str | None, limit: int, newest_first: bool) -> tuple[list[dict[str, Any]], bool]:
        jobs, more = await _answered(self._handle.page.remote(after, limit, newest_first))
        return jobs, more

    async def delete(self, job_id: str) -> None:
        await _answered(self._handle.delete.remote(job_id))

    async def cancel(self, job_id: str) -> bool:
        return bool(await _answered(self._handle.cancel.remote(job_id)))

    async def local_file(self, job_id: str, index: int) -> Path | None:
        name = await _answered(self._handle.file_name.remote(job_id, index))
        return await asyncio.to_thread(local_file, self._url, name, index)

    async def content(self, job_id: str, index: int) -> bytes:
        content: bytes = await _answered(self._handle.content.remote(job_id, index))
        return content


async def _answered(response: Any) -> Any:
    """What a method of `Videos` gave back. Raises the error that it gave back."""
    with our_errors():
        answer = await response
    if isinstance(answer, TridentServeError):
        raise answer
    return answer


def data_dir(args: AppArgs) -> Path:
    """Where the jobs are, and their files unless they have a place of their own."""
    return args.videos.data_dir or args.cache_dir / "videos"


def keeps_videos(args: AppArgs) -> bool:
    """Whether the service has this deployment: with a model that makes videos, or a `videos` section of its own (for
    models that come later)."""
    return "videos" in args.model_fields_set or any(_makes_videos(model) for model in args.models)


def _makes_videos(model: ModelArgs) -> bool:
    try:
        return family_of(model).frame_multiple is not None
    except CheckpointError:  # what is wrong with its folder is the Scheduler's to say
        return False


def videos_deployment() -> serve.Deployment:
    """More replicas than one would do no harm, and no good: the jobs are in one file."""
    return serve.deployment(
        name="Videos",
        num_replicas=1,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=10.0,
        user_config={},  # without one, Ray Serve would not call `reconfigure`
    )(Videos)
