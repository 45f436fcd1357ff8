"""Requests over a channel: updates come through, a loss at either end is told at the other, errors become ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError
from ray.serve.exceptions import BackPressureError

from deployments.backend import wait_for_result
from deployments.config.app import AppArgs
from deployments.schemas.image import build_image_request
from deployments.serve.gpu_shortage import count_gpus, find_gpu_shortage
from deployments.serve.remote_backend import RemoteBackend
from deployments.serve.scheduler_deployment import SchedulerDeployment
from tests.deployments.fake_backend import MODELS, FakeBackend, make_completed, make_png
from tests.deployments.serve.fake_scheduler import FakeHandle, as_ray_does
from tests.support.waiting import until
from tridentserve.engine.live.updates import CompletedUpdate, ProgressUpdate, QueuedUpdate
from tridentserve.errors import InvalidRequestError, OverloadedError, TridentServeError, WorkerError

ARGS = build_image_request({"prompt": "a cat", "size": "64x32", "num_inference_steps": 2, "request_id": "r1"}, MODELS)

pytestmark = pytest.mark.usefixtures("close_channels")


class Reference:
    """In place of Ray's: an awaitable that is no file."""

    def __init__(self, content: bytes | Exception) -> None:
        self._content = content

    def __await__(self) -> Generator[Any, None, bytes]:
        yield from ()
        if isinstance(self._content, Exception):
            raise self._content
        return self._content


COMPLETED = replace(make_completed(*ARGS), outputs=(make_png(64, 32),))


async def test_updates_come_through() -> None:
    backend = FakeBackend()
    updates = [update async for update in RemoteBackend(FakeHandle(backend)).generate(*ARGS)]
    assert updates == [QueuedUpdate("r1"), ProgressUpdate("r1", 1, 2), ProgressUpdate("r1", 2, 2), COMPLETED]
    assert backend.seen == [ARGS]


async def test_the_end_alone_comes_where_nothing_else_is_wanted() -> None:
    handle = FakeHandle(FakeBackend())
    updates = [update async for update in RemoteBackend(handle).generate(*ARGS, with_progress=False)]
    assert updates == [COMPLETED]


async def test_many_calls_share_one_channel_and_none_gets_the_updates_of_another() -> None:
    handle = FakeHandle(FakeBackend())
    remote = RemoteBackend(handle)

    async def ask(number: int) -> str:
        spec = replace(ARGS[0], request_id=f"r{number}")
        updates = [update async for update in remote.generate(spec, ARGS[1])]
        assert {update.request_id for update in updates[:-1]} == {spec.request_id}
        assert isinstance(updates[-1], CompletedUpdate)
        return spec.request_id

    assert len(set(await asyncio.gather(*(ask(number) for number in range(20))))) == 20
    assert len(handle.channels) == 1
    await handle.gate.wait_until_idle()


@pytest.mark.parametrize("with_progress", [True, False])
async def test_a_client_that_leaves_ends_its_request(with_progress: bool) -> None:
    backend = FakeBackend(allowed_steps=0)
    handle = FakeHandle(backend)
    waiting = asyncio.create_task(wait_for_result(RemoteBackend(handle).generate(*ARGS, with_progress)))
    await until(lambda: "r1" in backend.running)
    assert handle.gate.open_calls
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: backend.running == {})
    await handle.gate.wait_until_idle()


async def test_the_requests_of_a_replica_that_is_lost_go_on_for_a_while() -> None:
    backend = FakeBackend(allowed_steps=0)
    handle = FakeHandle(backend, orphan_s=0.5)
    remote = RemoteBackend(handle)
    waiting = asyncio.create_task(wait_for_result(remote.generate(*ARGS)))
    await until(lambda: "r1" in backend.running)
    remote._channel.close()
    with pytest.raises(WorkerError):
        await waiting
    assert "r1" in backend.running
    await until(lambda: backend.running == {})


async def test_a_scheduler_that_is_lost_fails_the_requests_and_the_next_one_finds_its_successor() -> None:
    backend = FakeBackend(allowed_steps=0)
    handle = FakeHandle(backend)
    remote = RemoteBackend(handle)
    waiting = asyncio.create_task(wait_for_result(remote.generate(*ARGS)))
    await until(lambda: "r1" in backend.running)
    assert handle.listener is not None
    handle.listener.close()
    with pytest.raises(WorkerError, match="not available at the moment"):
        await waiting
    await until(lambda: backend.running == {})  # the lost one would take its steps
    handle.listener, backend.allowed_steps = None, 2
    assert await wait_for_result(remote.generate(*ARGS)) == COMPLETED


async def test_outputs_that_are_no_small_files_come_through_ray() -> None:
    large = replace(make_completed(*ARGS), outputs=(Reference(make_png(64, 32)),))
    handle = FakeHandle(FakeBackend(fail=large))
    assert await wait_for_result(RemoteBackend(handle).generate(*ARGS)) == COMPLETED
    assert handle.gate.references == {}


async def test_an_image_that_is_lost() -> None:
    lost: Any = ObjectLostError
    backend = FakeBackend(fail=replace(make_completed(*ARGS), outputs=(Reference(lost("00" * 28, "", "")),)))
    with pytest.raises(WorkerError, match="lost"):
        _ = [update async for update in RemoteBackend(FakeHandle(backend)).generate(*ARGS)]


@pytest.mark.parametrize("replica_is_lost", [False, True])
async def test_references_that_nobody_takes_are_dropped(replica_is_lost: bool) -> None:
    large = replace(make_completed(*ARGS), outputs=(Reference(make_png(64, 32)),))
    handle = FakeHandle(FakeBackend(fail=large))
    fetched = asyncio.Event()

    async def wait_forever(call_id: str) -> None:
        fetched.set()
        await asyncio.Event().wait()

    handle.take_references = SimpleNamespace(remote=wait_forever)
    remote = RemoteBackend(handle)
    waiting = asyncio.create_task(wait_for_result(remote.generate(*ARGS)))
    await fetched.wait()
    assert handle.gate.references
    if replica_is_lost:
        remote._channel.close()
        await until(lambda: handle.gate.references == {})
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: handle.gate.references == {})


@pytest.mark.parametrize("error", [OverloadedError("full"), InvalidRequestError("too large", "size")])
async def test_a_refusal_comes_as_the_last_update(error: TridentServeError) -> None:
    remote = RemoteBackend(FakeHandle(FakeBackend(refuse=error)))
    with pytest.raises(type(error), match=str(error)) as caught:
        await wait_for_result(remote.generate(*ARGS))
    assert getattr(caught.value, "param", None) == getattr(error, "param", None)


async def test_a_defect_of_the_scheduler_ends_the_call(caplog: pytest.LogCaptureFixture) -> None:
    remote = RemoteBackend(FakeHandle(FakeBackend(refuse=ZeroDivisionError("a defect"))))
    with pytest.raises(TridentServeError, match="its log says why"):
        await wait_for_result(remote.generate(*ARGS))
    assert "a defect" in caplog.text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BackPressureError(num_queued_requests=9, max_queued_requests=9), OverloadedError),
        (ActorDiedError(), WorkerError),
        (as_ray_does(WorkerError("the service is starting")), WorkerError),
        (as_ray_does(ValueError("a defect")), RayTaskError),
    ],
)
async def test_errors_of_ray(error: Exception, expected: type[Exception]) -> None:
    updates = RemoteBackend(FakeHandle(FakeBackend(), refuse=error)).generate(*ARGS)
    assert isinstance(updates, AsyncGenerator)
    with pytest.raises(expected):
        await anext(updates)


async def test_cancel_and_health() -> None:
    backend = FakeBackend()
    remote = RemoteBackend(FakeHandle(backend))
    assert await remote.get_health() == {"status": "ready", "workers": 4}
    assert not await remote.cancel("r1")
    backend.state = as_ray_does(WorkerError("gone"))
    with pytest.raises(WorkerError, match=r"^gone$"):
        await remote.get_health()


@pytest.mark.parametrize(
    ("alive", "warming", "aside", "status"),
    [
        (["w0", "w1"], {}, {}, "ready"),
        (["w0", "w1"], {}, {"w1": "3 plans in a row failed there"}, "degraded"),
        (["w0"], {"w1": {"done": 1, "total": 3}}, {}, "degraded"),
        ([], {"w1": {}}, {}, "warming"),
    ],
)
async def test_health_names_the_workers_that_are_warmed_up_again_or_set_aside(
    alive: list[str], warming: dict[str, Any], aside: dict[str, str], status: str
) -> None:
    engine = SimpleNamespace(
        list_live_workers=lambda: alive, warming=warming, warming_models={}, aside=aside, placement={}
    )
    scheduler: Any = SimpleNamespace(_require_engine=lambda: engine, _num_workers=2, _reconciler=None)
    expected: dict[str, Any] = {"status": status, "workers": len(alive), "workers_total": 2, "placement": {}}
    extra: dict[str, Any] = {"warming": warming, "aside": aside}
    expected |= {name: value for name, value in extra.items() if value}
    assert await SchedulerDeployment.get_health(scheduler) == expected
    engine.warming_models = {"m": {"done": 1, "total": 3}}
    with_model = await SchedulerDeployment.get_health(scheduler)
    assert (with_model["status"], with_model["warming_models"]) == (status, engine.warming_models)


@pytest.mark.parametrize("topic", ["profiling", "warming"])
async def test_health_tells_what_a_starting_scheduler_does(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve holds the call back until the Scheduler has started. Without news, it is waited for."""
    news: dict[str, Any] = {"model": "own", "latest": "encode 64x64 degree 1"}
    started = asyncio.Event()

    async def wait_for_start() -> dict[str, Any]:
        await started.wait()
        return {"status": "ready"}

    async def read_news() -> tuple[str, dict[str, Any]] | None:
        return (topic, news) if news else None

    monkeypatch.setattr("deployments.serve.remote_backend._START_S", 0.0)
    monkeypatch.setattr("deployments.serve.remote_backend.read_start_news", read_news)
    handle: Any = SimpleNamespace(get_health=SimpleNamespace(remote=wait_for_start))
    backend = RemoteBackend(handle)
    assert await backend.get_health() == {"status": topic, "workers": 0, topic: dict(news)}
    news.clear()
    waiting = asyncio.create_task(backend.get_health())
    await asyncio.sleep(0)
    started.set()
    assert await waiting == {"status": "ready"}


@pytest.mark.parametrize(("has", "waits"), [({}, True), ({"GPU": 1.0}, True), ({"GPU": 2.0}, False)])
async def test_health_tells_that_the_scheduler_waits_for_gpus(
    has: dict[str, float], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray holds the Scheduler's replica back until there are as many GPUs."""
    started = asyncio.Event()

    async def wait_for_start() -> dict[str, Any]:
        await started.wait()
        return {"status": "ready"}

    def ask_ray() -> dict[str, float]:
        started.set()
        return has

    monkeypatch.setattr("deployments.serve.remote_backend._START_S", 0.0)
    monkeypatch.setattr("ray.cluster_resources", ask_ray)
    handle: Any = SimpleNamespace(get_health=SimpleNamespace(remote=wait_for_start))
    cluster = {"nodes": 1, "workers_per_node": 2, "device": "cuda", "device_name": "NVIDIA L20"}
    args = AppArgs.model_validate({"models": [{"name": "m", "tiny": "sd3"}], "cluster": cluster})
    health = await RemoteBackend(handle, count_gpus(args)).get_health()
    if waits:
        (problem,) = health.pop("problems")
        assert health == {"status": "waiting_for_gpus", "workers": 0}
        assert f"Ray has {int(has.get('GPU', 0))} GPUs, and this configuration wants 2" in problem
        assert "cluster.device: cpu" in problem
    else:
        assert health == {"status": "ready"}


def test_a_service_on_cpus_waits_for_no_gpu() -> None:
    args = AppArgs.model_validate({"models": [{"name": "m", "tiny": "sd3"}], "cluster": {"workers_per_node": 2}})
    assert find_gpu_shortage(count_gpus(args)) is None, "Ray, which is not there, is not asked"
