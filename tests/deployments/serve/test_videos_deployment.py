"""The Videos deployment as another replica sees it: clients' mistakes are no failures of the service."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.config.app import AppArgs
from deployments.serve.videos_deployment import RemoteVideoBackend, VideosDeployment
from deployments.videos.jobs import VideoJobs
from deployments.videos.storage import find_local_file
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.serve.fake_scheduler import FakeHandle, as_ray_does
from tests.deployments.videos.test_store import request
from tridentserve.errors import InvalidRequestError, RequestNotFoundError, WorkerError


def make_args(directory: Path) -> AppArgs:
    cluster = {"workers_per_node": 1, "memory_mb": 1024}
    models = [{"name": "m", "tiny": "wan"}]
    return AppArgs.model_validate(
        {"models": models, "cluster": cluster, "placement": ["EDC"], "cache_dir": str(directory)}
    )


class Replica(VideosDeployment):
    def __del__(self) -> None:  # type: ignore[override]
        """Ray Serve awaits that of `VideosDeployment`; nobody does here."""


def handle_to(videos: Any) -> Any:
    """A stand-in for a handle of Ray Serve: arguments and results are copies."""

    async def call(*args: Any) -> Any:
        return pickle.loads(pickle.dumps(await videos.call(*pickle.loads(pickle.dumps(args)))))  # noqa: S301

    return SimpleNamespace(call=SimpleNamespace(remote=call))


@pytest.mark.usefixtures("close_channels")
async def test_errors_come_back_as_values_and_are_raised_here(tmp_path: Path) -> None:
    args = make_args(tmp_path)
    videos = Replica([FakeHandle(FakeBackend(allowed_steps=0))], args)
    remote = RemoteVideoBackend(handle_to(videos), args)
    await videos.reconfigure(None)
    try:
        told = await remote.submit(*request("a"), 0)
        assert (await remote.get("a"))["id"] == told["id"] == "a"
        assert [job["id"] for job in (await remote.list_page(None, 9, True))[0]] == ["a"]
        assert isinstance(await videos.call(VideoJobs.get, "b"), RequestNotFoundError)
        for asked in (remote.get("b"), remote.delete("b"), remote.read_content("b", 0), remote.find_local_file("a", 7)):
            with pytest.raises(RequestNotFoundError, match="video"):
                await asked
        with pytest.raises(InvalidRequestError) as caught:
            await remote.submit(*request("a", prompt="another"), 0)
        assert caught.value.param == "request_id"
        assert await remote.cancel("a")
        assert not await remote.cancel("a")
    finally:
        await videos._jobs.stop()


async def test_where_files_lie_is_looked_up_without_a_directory_of_their_own_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the node of an Api replica there may be none, and it may not be allowed to make one."""
    elsewhere = tmp_path / "elsewhere"
    args = make_args(elsewhere)

    async def name(*_: object) -> str:
        return "a-1"

    threads = list[str]()

    def looked_for(*asked: Any) -> Path | None:
        threads.append(threading.current_thread().name)
        return find_local_file(*asked)

    monkeypatch.setattr("deployments.serve.videos_deployment.find_local_file", looked_for)
    remote = RemoteVideoBackend(SimpleNamespace(call=SimpleNamespace(remote=name)), args)
    assert await remote.find_local_file("a", 0) is None
    assert not elsewhere.exists()
    assert threads != [threading.main_thread().name]


async def test_errors_of_ray_are_still_reported(tmp_path: Path) -> None:
    async def lost(*_: object) -> None:
        raise as_ray_does(WorkerError("gone"))

    args = make_args(tmp_path)
    with pytest.raises(WorkerError, match=r"^gone$"):
        await RemoteVideoBackend(SimpleNamespace(call=SimpleNamespace(remote=lost)), args).get("a")
