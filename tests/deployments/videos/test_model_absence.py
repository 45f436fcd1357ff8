"""Video jobs whose model is drained, replaced or removed when their turn comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.videos.jobs import VideoJobs
from deployments.videos.model_absence import AWAY_S, GONE_S, ModelAbsences
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.videos.test_worker import Clock, Service, submit, wait_for_status
from tests.support.waiting import until
from tridentserve.engine.live.updates import FailedUpdate
from tridentserve.errors import WorkerError


def make_refusal(code: str) -> FailedUpdate:
    return FailedUpdate("a", code, "tiny-wan is not there")


def make_health(tiny: str | None = None, other: str = "serving") -> dict[str, object]:
    models = {"other": other, **({} if tiny is None else {"tiny-wan": tiny})}
    return {"status": "ready", "workers": 1, "models": models}


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


class Refusing:
    """A job whose model refuses it until the test says otherwise."""

    def __init__(self, service: Service, jobs: VideoJobs, backend: FakeBackend) -> None:
        self.service, self.jobs, self.backend = service, jobs, backend

    async def until_refused(self, count: int) -> None:
        """Return once the model has refused the job `count` times and the job waits again."""
        await until(lambda: len(self.backend.seen) == count and not self.jobs._worker._runs)
        assert (await self.jobs.get("a"))["status"] == "queued"

    def pass_by(self, seconds: float) -> None:
        self.service.clock.now_s += seconds
        self.jobs._worker._wake.set()


@pytest.mark.parametrize("code", ["model_unavailable", "model_not_found"])
async def test_a_job_waits_while_its_model_is_replaced(service: Service, code: str) -> None:
    backend = FakeBackend(refuse_with=make_refusal(code))
    states: list[dict[str, object] | Exception] = [
        make_health(tiny="draining"),
        WorkerError("the scheduler is not there"),
        make_health(other="loading"),
        make_health(tiny="loading"),
    ]
    async with service.run(backend, max_attempts=1) as jobs:
        refusing = Refusing(service, jobs, backend)
        for count, state in enumerate(states, start=1):
            backend.state = state
            if count == 1:
                await submit(jobs, "a")
            else:
                refusing.pass_by(5.0)
            await refusing.until_refused(count)
        backend.refuse_with = None
        refusing.pass_by(5.0)
        await wait_for_status(jobs, "a", "completed")


async def test_a_job_whose_model_is_removed_for_good_ends_with_that_error(service: Service) -> None:
    backend = FakeBackend(refuse_with=make_refusal("model_not_found"), state=make_health(other="serving"))
    async with service.run(backend) as jobs:
        refusing = Refusing(service, jobs, backend)
        await submit(jobs, "a")
        await refusing.until_refused(1)
        refusing.pass_by(GONE_S)
        job = await wait_for_status(jobs, "a", "failed")
        assert job["error"]["code"] == "model_not_found"


def test_a_model_may_be_away_for_a_while() -> None:
    clock = Clock()
    models = ModelAbsences(clock)

    def after(seconds: float, state: str | None) -> bool:
        clock.now_s += seconds
        return models.may_return("m", state)

    assert after(0.0, "draining")
    assert after(AWAY_S - 100, "draining")
    assert after(10.0, None)  # the last moments of the old one, and another that leaves after it
    assert after(GONE_S - 1, None)
    assert after(0.5, "loading")
    assert after(0.5, None)
    assert not after(GONE_S, None)
    assert models.may_return("other", None)
    assert after(0.0, "serving")
    assert after(AWAY_S - 1, "draining")  # it has been back
    assert after(AWAY_S - 1, "draining")
    assert not after(1.0, "draining")
    models.mark_present("m")
    assert after(0.0, None)
