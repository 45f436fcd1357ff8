"""Video jobs are worked off, outlive their process, and are cleared away."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.config.videos import VideosArgs
from deployments.videos.jobs import DATABASE, VideoJobs
from deployments.videos.store import VideoStore
from tests.deployments.fake_backend import FakeBackend, make_video
from tests.deployments.videos.test_store import request
from tests.support.waiting import PATIENCE_S, until
from tridentserve.engine.live.updates import FailedUpdate
from tridentserve.errors import OverloadedError, RequestNotFoundError, WorkerError

LEASE_S = 3.0


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Service:
    """The things that processes share: the directory and the clock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = Clock()

    def process(self, backend: FakeBackend, **options: Any) -> VideoJobs:
        return VideoJobs(backend, VideosArgs(lease_s=LEASE_S, **options), self.directory, self.clock)

    @asynccontextmanager
    async def run(self, backend: FakeBackend, **options: Any) -> AsyncIterator[VideoJobs]:
        jobs = self.process(backend, **options)
        await jobs.start()
        try:
            yield jobs
        finally:
            await jobs.stop()

    def list_files(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "results").iterdir())


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


async def submit(jobs: VideoJobs, job_id: str, priority: int = 0) -> dict[str, Any]:
    return await jobs.submit(*request(job_id, prompt=job_id), priority)


async def wait_for_status(jobs: VideoJobs, job_id: str, wanted: str) -> dict[str, Any]:
    deadline_s = time.monotonic() + PATIENCE_S
    while (job := await jobs.get(job_id))["status"] != wanted:
        assert time.monotonic() < deadline_s, job
        await asyncio.sleep(0.01)
    return job


async def wait_until_left(jobs: VideoJobs, wanted: list[str]) -> None:
    """These jobs, oldest first, and no others."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (left := [job["id"] for job in (await jobs.list_page(None, 9, newest_first=False))[0]]) != wanted:
        assert time.monotonic() < deadline_s, left
        await asyncio.sleep(0.01)


async def test_a_job_from_queued_to_completed(service: Service) -> None:
    backend = FakeBackend(allowed_steps=1)
    async with service.run(backend) as jobs:
        told = await submit(jobs, "a", priority=2)
        assert (told["id"], told["object"], told["status"], told["progress"]) == ("a", "video", "queued", 0)
        assert (told["size"], told["seconds"], told["num_frames"], told["fps"]) == ("64x64", "1.125", 9, 8)
        assert (told["created_at"], told["priority"], told["completed_at"]) == (1_000_000, 2, None)
        running = await wait_for_status(jobs, "a", "in_progress")
        assert running["progress"] == 25
        with pytest.raises(RequestNotFoundError, match="not yet"):
            await jobs.read_content("a", 0)
        backend.allowed_steps = math.inf
        done = await wait_for_status(jobs, "a", "completed")
        assert (done["progress"], done["completed_at"], done["expires_at"]) == (100, 1_000_000, 1_086_400)
        assert done["inference_time_s"] == 0.5
        assert (done["peak_memory_mb"], done["stage_durations"]["diffuse"]) == (12.5, 0.3)
        assert await jobs.read_content("a", 0) == make_video("a")
        path = await jobs.find_local_file("a", 0)
        assert path is not None
        assert path.read_bytes() == make_video("a")
        with pytest.raises(RequestNotFoundError):
            await jobs.read_content("a", 1)


async def test_jobs_beyond_those_in_flight_go_by_priority(service: Service) -> None:
    backend = FakeBackend()
    jobs = service.process(backend, max_in_flight=1)
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 5)):
        await submit(jobs, name, priority)
    await jobs.start()
    for name in "abcd":
        await wait_for_status(jobs, name, "completed")
    assert [spec.request_id for spec, _ in backend.seen] == ["d~4", "b~2", "a~1", "c~3"]
    await jobs.stop()


async def test_a_failure_is_reported(service: Service) -> None:
    async with service.run(FakeBackend(fail=FailedUpdate("a", "lost", "out"))) as jobs:
        await submit(jobs, "a")
        job = await wait_for_status(jobs, "a", "failed")
        assert job["error"] == {"message": "out", "type": "server_error", "param": None, "code": "lost"}
        assert not service.list_files()
    async with service.run(FakeBackend()) as jobs:
        await submit(jobs, "a")  # again: what failed may be tried once more
        await wait_for_status(jobs, "a", "completed")


async def test_delete_stops_a_job_and_then_removes_it(service: Service) -> None:
    backend = FakeBackend(allowed_steps=1)
    async with service.run(backend) as jobs:
        await submit(jobs, "a")
        await wait_for_status(jobs, "a", "in_progress")
        await jobs.delete("a")
        job = await jobs.get("a")
        assert (job["status"], job["error"]["code"]) == ("failed", "cancelled")
        await until(lambda: not backend.running)
        assert backend.ended["a~1"] in ("closed", "cancelled")
        await jobs.delete("a")
        with pytest.raises(RequestNotFoundError):
            await jobs.get("a")
        with pytest.raises(RequestNotFoundError):
            await jobs.delete("a")


async def test_delete_of_a_completed_job_takes_its_files(service: Service) -> None:
    async with service.run(FakeBackend()) as jobs:
        await submit(jobs, "a")
        await wait_for_status(jobs, "a", "completed")
        assert len(service.list_files()) == 1
        await jobs.delete("a")
        assert service.list_files() == []


async def test_a_process_that_ends_in_order_gives_its_jobs_back_at_once(service: Service) -> None:
    first, second = FakeBackend(allowed_steps=0), FakeBackend()
    async with service.run(first) as jobs:
        for name in "abc":
            await submit(jobs, name)
        await until(lambda: len(first.running) == 3)
    assert not first.running
    async with service.run(second) as jobs:
        for name in "abc":
            await wait_for_status(jobs, name, "completed")
    assert [spec.request_id for spec, _ in second.seen] == ["a~1", "b~2", "c~3"]


async def test_a_process_that_was_killed_is_taken_over_when_its_leases_have_run_out(service: Service) -> None:
    dead, heir = FakeBackend(allowed_steps=0), FakeBackend()
    killed = service.process(dead)
    await killed.start()
    await submit(killed, "a")
    await until(lambda: bool(dead.running))
    await silence(killed)
    async with service.run(heir) as jobs:
        await jobs._worker._claim()
        assert (await jobs.get("a"))["status"] == "queued"
        assert not heir.seen
        service.clock.now_s += LEASE_S
        done = await wait_for_status(jobs, "a", "completed")
        assert done["progress"] == 100
    await killed.stop()


async def silence(jobs: VideoJobs) -> None:
    """It renews nothing any more, as if it were dead; the jobs that it has in hand continue."""
    assert jobs._worker._pump is not None
    jobs._worker._pump.cancel()
    await jobs._store.run(lambda store: None)  # A renewal that is under way has ended.


async def test_a_replica_that_lost_a_lease_cannot_end_the_job_and_leaves_the_heirs_file(service: Service) -> None:
    slow, heir = FakeBackend(allowed_steps=0), FakeBackend()
    stalled = service.process(slow)
    await stalled.start()
    await submit(stalled, "a")
    await until(lambda: bool(slow.running))
    await silence(stalled)
    service.clock.now_s += LEASE_S
    async with service.run(heir) as jobs:
        done = await wait_for_status(jobs, "a", "completed")
        slow.allowed_steps = math.inf
        await until(lambda: not stalled._worker._runs)
        assert slow.ended["a~1"] == "completed", "it comes too late"
        assert await jobs.get("a") == done
        assert await jobs.read_content("a", 0) == make_video("a")
    await stalled.stop()


async def test_a_job_that_ends_the_service_again_and_again_is_given_up(service: Service) -> None:
    store = VideoStore(service.directory / DATABASE)
    store.submit(*request("a"), 0, service.clock(), 10, 0)
    for _ in range(2):
        store.claim("dead", 1, service.clock(), LEASE_S)
        service.clock.now_s += LEASE_S
    store.close()
    async with service.run(FakeBackend(), max_attempts=2) as jobs:
        job = await wait_for_status(jobs, "a", "failed")
        assert "the service has ended 2 times" in job["error"]["message"]


async def test_the_image_of_a_job_outlives_its_process(service: Service) -> None:
    slow, heir = FakeBackend(allowed_steps=0), FakeBackend()
    async with service.run(slow) as jobs:
        await jobs.submit(*request("a", image=b"fox"), 0)
        await until(lambda: bool(slow.running))
    async with service.run(heir) as jobs:
        await wait_for_status(jobs, "a", "completed")
        joined = await jobs.submit(*request("a", image=b"fox"), 0)
        assert joined["status"] == "completed"
    assert [inputs.image for _, inputs in slow.seen + heir.seen] == [b"fox", b"fox"]
    store = VideoStore(service.directory / DATABASE)
    job = store.find("a")
    assert job is not None
    assert store.find_image(job.number) is None
    store.close()


async def test_the_images_of_jobs_that_wait_have_a_bound(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.videos.jobs.MIB", 4)
    jobs = service.process(FakeBackend(), max_results_mb=2)
    await jobs.submit(*request("a", image=b"12345"), 0)
    with pytest.raises(OverloadedError, match="images"):
        await jobs.submit(*request("b", image=b"6789"), 0)
    await jobs.stop()


@pytest.mark.parametrize("error", [OverloadedError("full"), WorkerError("no scheduler")])
async def test_a_job_waits_while_the_service_cannot_take_it(service: Service, error: Exception) -> None:
    backend = FakeBackend(refuse=error)
    async with service.run(backend) as jobs:
        await submit(jobs, "a")
        await until(lambda: backend.num_refused == 1 and not jobs._worker._runs)
        assert (await jobs.get("a"))["status"] == "queued"
        backend.refuse = None
        service.clock.now_s += 1.0
        await wait_for_status(jobs, "a", "completed")
