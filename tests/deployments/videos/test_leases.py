"""The leases of jobs when their process, or its disk, is slow; and what images of jobs may take at once."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path

import pytest

from tests.deployments.fake_backend import FakeBackend
from tests.deployments.videos.test_store import request
from tests.deployments.videos.test_worker import LEASE_S, Service, submit, wait_for_status
from tests.support.waiting import until


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


async def test_a_lease_is_renewed_from_when_the_store_is_reached(service: Service) -> None:
    """And not from when it was asked for: the calls before it may take longer than the lease."""
    backend, opened = FakeBackend(allowed_steps=0), threading.Event()
    jobs = service.process(backend)
    await submit(jobs, "a")
    await jobs._worker._claim()
    await until(lambda: bool(backend.running))
    jobs._store._thread.submit(opened.wait)
    renewing = asyncio.create_task(jobs._worker._keep_leases())
    await until(lambda: jobs._store._thread._work_queue.qsize() == 1)
    service.clock.now_s += LEASE_S + 1
    opened.set()
    await renewing
    other = service.process(FakeBackend())
    await other._worker._claim()
    assert not other._worker._runs
    await asyncio.gather(jobs.stop(), other.stop())


async def test_a_job_whose_lease_ran_out_is_not_run_twice_by_its_own_process(service: Service) -> None:
    backend = FakeBackend(allowed_steps=0)
    jobs = service.process(backend)
    await submit(jobs, "a")
    await jobs._worker._claim()
    await until(lambda: bool(backend.running))
    service.clock.now_s += LEASE_S
    await jobs._worker._claim()
    backend.allowed_steps = math.inf
    await wait_for_status(jobs, "a", "completed")
    await until(lambda: not jobs._worker._runs)
    assert len(backend.seen) == 1
    await jobs.stop()


async def test_jobs_in_flight_hold_a_bounded_number_of_image_bytes(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.videos.worker.MAX_JOBS_BYTES", 100)
    backend = FakeBackend(allowed_steps=0)
    async with service.run(backend) as jobs:
        for name, size in (("a", 70), ("b", 40), ("c", 30)):
            await jobs.submit(*request(name, image=bytes(size)), 0)
        await submit(jobs, "d")
        await until(lambda: set(backend.running) == {"a~1", "d~4"})  # c waits behind b, which has no room
        await jobs.delete("a")
        await until(lambda: set(backend.running) == {"b~2", "c~3", "d~4"})
