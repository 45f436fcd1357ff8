"""The files of video jobs: what they leave when they end, and what is never touched."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from deployments.videos.jobs import DATABASE
from deployments.videos.storage import VideoStorage, find_local_file
from deployments.videos.store import VideoStore
from tests.deployments.fake_backend import FakeBackend, make_video
from tests.deployments.videos.test_store import request
from tests.deployments.videos.test_worker import Service, submit, wait_for_status, wait_until_left
from tests.support.waiting import PATIENCE_S, until

HOUR_S = 3600.0


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


class SlowResults(VideoStorage):
    """A storage that writes a file when the test allows it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.begun, self.opened = threading.Event(), threading.Event()

    def write(self, name: str, videos: Iterable[bytes]) -> None:
        self.begun.set()
        self.opened.wait(PATIENCE_S)
        super().write(name, videos)


async def test_old_jobs_and_their_files_go(service: Service) -> None:
    async with service.run(FakeBackend(), retention_s=60) as jobs:
        await submit(jobs, "a")
        await wait_for_status(jobs, "a", "completed")
    service.clock.now_s += 61
    async with service.run(FakeBackend(), retention_s=60) as jobs:
        await until(lambda: service.list_files() == [])
        await wait_until_left(jobs, [])


async def test_the_oldest_files_make_room(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.videos.retention.MIB", len(make_video("a")))
    async with service.run(FakeBackend(), max_results_mb=2) as jobs:
        for name in "abc":
            await submit(jobs, name)
            await wait_for_status(jobs, name, "completed")
            service.clock.now_s += 1
        await wait_until_left(jobs, ["b", "c"])
        assert len(service.list_files()) == 2
    async with service.run(FakeBackend(), max_results_mb=1) as jobs:
        await jobs.submit(*request("large", prompt="a" * 100), 0)
        job = await wait_for_status(jobs, "large", "failed")
        assert (job["error"]["code"], "max_results_mb" in job["error"]["message"]) == ("storage_failed", True)


async def test_files_may_lie_where_a_url_points(service: Service) -> None:
    async with service.run(FakeBackend(), results_url="memory://videos") as jobs:
        await submit(jobs, "a")
        await wait_for_status(jobs, "a", "completed")
        assert await jobs.find_local_file("a", 0) is None
        assert await jobs.read_content("a", 0) == make_video("a")
        await jobs.delete("a")
        with pytest.raises(FileNotFoundError):
            jobs.storage.read("a-1", 0)


async def test_foreign_files_are_neither_read_nor_removed(service: Service) -> None:
    """Whatever their names look like; and no number in them is counted up to."""
    names = ["render-1.mp4", "render-5000000.mp4", "x-20261122.mp4", "gone-17-0.mp4", "a.mp4", "-0.mp4", ".part"]
    async with service.run(FakeBackend()) as jobs:
        await submit(jobs, "a")
        await wait_for_status(jobs, "a", "completed")
        for name in names:
            (service.directory / "results" / name).write_bytes(b"mine")
        service.clock.now_s += 2 * HOUR_S
        await jobs._retention.sweep(retention_s=HOUR_S)
        await wait_until_left(jobs, [])
    assert service.list_files() == sorted(names)


async def test_what_processes_that_died_were_writing_goes_after_an_hour(service: Service) -> None:
    async with service.run(FakeBackend()) as jobs:
        store = VideoStore(service.directory / DATABASE)
        job = store.submit(*request("died"), 0, service.clock(), 10, 0)
        store.begin_files(job, service.clock())
        assert store.fail(None, job.number, {"code": "x"}, service.clock())
        jobs.storage.write(job.file_name, [b"x"])
        left, ours, foreign = (service.directory / "results" / name for name in PARTS)
        for path, mtime_s in ((left, -2 * HOUR_S), (ours, 0.0), (foreign, -2 * HOUR_S)):
            path.write_bytes(b"x")
            os.utime(path, times=(0, service.clock() + mtime_s))
        await jobs._retention.sweep(retention_s=10 * HOUR_S)
        assert len(service.list_files()) == 3
        service.clock.now_s += HOUR_S - 1
        await jobs._retention.sweep(retention_s=10 * HOUR_S)
        assert job.file_name + "-0.mp4" in service.list_files()
        service.clock.now_s += 2
        await jobs._retention.sweep(retention_s=10 * HOUR_S)
        assert service.list_files() == [foreign.name]
        assert store.list_unkept_files(service.clock() + HOUR_S) == []
        store.close()


PARTS = (".died-1-0.mp4.abc_1234.part", ".a-2-0.mp4.abc_1234.part", ".download.part")


def test_a_file_is_written_through_a_name_that_the_sweep_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    results = VideoStorage(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lost)
        patch.setattr(Path, "unlink", lambda self, missing_ok: None)  # the process is dead
        with pytest.raises(KeyboardInterrupt):
            results.write("fox-1", [b"x"])
    assert len(list(tmp_path.iterdir())) == 1
    results.sweep_parts(before_s=0.0)
    assert len(list(tmp_path.iterdir())) == 1
    results.sweep_parts(before_s=1e12)
    assert list(tmp_path.iterdir()) == []


async def test_delete_while_the_file_is_written_leaves_nothing(service: Service) -> None:
    jobs = service.process(FakeBackend())
    slow = jobs._retention._storage = SlowResults(str(service.directory / "results"))
    await jobs.start()
    await submit(jobs, "a")
    await until(slow.begun.is_set)
    await jobs.delete("a")
    await jobs.delete("a")
    await wait_until_left(jobs, [])
    slow.opened.set()
    await until(lambda: not jobs._worker._runs)
    assert service.list_files() == []
    await jobs.stop()


async def test_what_is_being_written_when_the_service_ends_is_kept(service: Service) -> None:
    jobs = service.process(FakeBackend())
    slow = jobs._retention._storage = SlowResults(str(service.directory / "results"))
    await jobs.start()
    await submit(jobs, "a")
    await until(slow.begun.is_set)
    stopping = asyncio.create_task(jobs.stop())
    await until(lambda: jobs._worker._is_stopping)
    slow.opened.set()
    await stopping
    again = FakeBackend()
    async with service.run(again) as jobs:
        assert (await jobs.get("a"))["status"] == "completed"
        assert await jobs.read_content("a", 0) == make_video("a")
    assert not again.seen


async def test_a_job_that_cannot_be_written_whole_leaves_no_part_of_it(service: Service) -> None:
    class Full(VideoStorage):
        def write(self, name: str, videos: Iterable[bytes]) -> None:
            super().write(name, [b"the first"])
            raise OSError(28, "No space left on device")

    jobs = service.process(FakeBackend())
    jobs._retention._storage = Full(str(service.directory / "results"))
    await jobs.start()
    await submit(jobs, "a")
    job = await wait_for_status(jobs, "a", "failed")
    assert job["error"]["code"] == "storage_failed"
    await until(lambda: not jobs._worker._runs)
    assert service.list_files() == []
    await jobs.stop()


async def test_a_slow_sweep_holds_up_no_lease(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, opened = threading.Event(), threading.Event()

    def slow(self: VideoStorage, before_s: float) -> None:
        begun.set()
        opened.wait(PATIENCE_S)

    monkeypatch.setattr(VideoStorage, "sweep_parts", slow)
    async with service.run(FakeBackend()) as jobs:
        await until(begun.is_set)
        await submit(jobs, "a")
        try:
            await wait_for_status(jobs, "a", "completed")
        finally:
            opened.set()


@pytest.mark.parametrize("url", ["memory://videos", "s3://bucket/videos", "simplecache::s3://bucket"])
def test_files_of_elsewhere_are_not_looked_for_here(url: str) -> None:
    """s3fs is not even needed."""
    assert find_local_file(url, "a-1", 0) is None


def test_looking_for_a_file_makes_no_directory(tmp_path: Path) -> None:
    directory = tmp_path / "results"
    for url in (str(directory), f"file://{directory}"):
        assert find_local_file(url, "a-1", 0) is None
        assert not directory.exists()
    VideoStorage(str(directory)).write("a-1", [b"x", b"y"])
    for url in (str(directory), f"file://{directory}"):
        assert find_local_file(url, "a-1", 1) == directory / "a-1-1.mp4"
