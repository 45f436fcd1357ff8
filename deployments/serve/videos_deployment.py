"""The Videos deployment: one replica that keeps the video jobs and works them off; and the client of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ray import serve

from deployments.config.app import AppArgs
from deployments.config.models import ModelArgs
from deployments.models.served import find_family
from deployments.replica_logs import prepare_logs
from deployments.serve.call_errors import translate_call_errors
from deployments.serve.cells_backend import choose_backend
from deployments.serve.remote_backend import RemoteBackend
from deployments.serve.scheduler_deployment import MAX_ONGOING_REQUESTS
from deployments.videos.jobs import VideoJobs, choose_storage_url
from deployments.videos.storage import find_local_file
from tridentserve.errors import ModelFolderError, TridentServeError, WorkerError
from tridentserve.requests import GenerationInputs, RequestSpec

P = ParamSpec("P")
T = TypeVar("T")


class VideosDeployment:
    """`VideoJobs` as a replica. When its process ends, the next one resumes the jobs, which are in its directory."""

    def __init__(self, schedulers: list[Any], args: AppArgs) -> None:
        """`schedulers` has the `ray.serve.handle.DeploymentHandle` of each cell's."""
        prepare_logs()
        backend = choose_backend([RemoteBackend(scheduler) for scheduler in schedulers], args)
        self._jobs = VideoJobs(backend, args.videos, choose_data_dir(args))

    async def reconfigure(self, _: Any) -> None:
        """Ray Serve calls it before the first request, in the event loop that serves them."""
        await self._jobs.start()

    async def __del__(self) -> None:
        """Ray Serve calls it when the replica ends in order."""
        await self._jobs.stop()

    def check_health(self) -> None:
        if not self._jobs.is_healthy:
            raise WorkerError("video jobs are not worked off any more")

    async def call(
        self, method: Callable[Concatenate[VideoJobs, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T | TridentServeError:
        """The result of a method of `VideoJobs`. An error for clients is returned instead of raised, because Ray Serve
        would log it as a failure of the replica."""
        try:
            return await method(self._jobs, *args, **kwargs)
        except TridentServeError as error:
            return error


class RemoteVideoBackend:
    """The Videos deployment as a `VideoBackend`, for another replica."""

    def __init__(self, videos: Any, args: AppArgs) -> None:
        """`videos` is a `ray.serve.handle.DeploymentHandle`."""
        self._handle = videos
        self._url = choose_storage_url(args.videos, choose_data_dir(args))

    async def submit(self, spec: RequestSpec, inputs: GenerationInputs, priority: int) -> dict[str, Any]:
        return await self._call(VideoJobs.submit, spec, inputs, priority)

    async def get(self, job_id: str) -> dict[str, Any]:
        return await self._call(VideoJobs.get, job_id)

    async def list_page(self, after: str | None, limit: int, newest_first: bool) -> tuple[list[dict[str, Any]], bool]:
        return await self._call(VideoJobs.list_page, after, limit, newest_first)

    async def delete(self, job_id: str) -> None:
        await self._call(VideoJobs.delete, job_id)

    async def cancel(self, job_id: str) -> bool:
        return await self._call(VideoJobs.cancel, job_id)

    async def find_local_file(self, job_id: str, index: int) -> Path | None:
        name = await self._call(VideoJobs.find_file_name, job_id, index)
        return await asyncio.to_thread(find_local_file, self._url, name, index)

    async def read_content(self, job_id: str, index: int) -> bytes:
        return await self._call(VideoJobs.read_content, job_id, index)

    async def _call(
        self, method: Callable[Concatenate[VideoJobs, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The result of a method over there. Raises the error that it returned."""
        with translate_call_errors():
            answer: T | TridentServeError = await self._handle.call.remote(method, *args, **kwargs)
        if isinstance(answer, TridentServeError):
            raise answer
        return answer


def choose_data_dir(args: AppArgs) -> Path:
    """The directory of the jobs, and of their files unless these have a URL of their own."""
    return args.videos.data_dir or args.cache_dir / "videos"


def needs_videos(args: AppArgs) -> bool:
    """True if the service has this deployment: with a model that makes videos, or with a `videos` section (for models
    that are added later)."""
    return "videos" in args.model_fields_set or any(_makes_videos(model) for model in args.models)


def _makes_videos(model: ModelArgs) -> bool:
    try:
        return find_family(model).frame_multiple is not None
    except ModelFolderError:  # the Scheduler reports a model folder that cannot be read
        return model.is_unfetched  # what it makes is known when it is there


def make_videos_deployment() -> serve.Deployment:
    """More replicas than one would do no harm and no good, because the jobs are in one file."""
    return serve.deployment(
        name="Videos",
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=10.0,
        user_config={},  # without one, Ray Serve would not call `reconfigure`
    )(VideosDeployment)
