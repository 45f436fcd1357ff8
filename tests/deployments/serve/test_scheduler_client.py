"""The backend behind a Ray handle: errors of Ray become errors of ours, and leaving tells the other side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError
from ray.serve.exceptions import BackPressureError

from deployments.backend import closing, wait_for_result
from deployments.schemas.image import build_image_request
from deployments.serve.scheduler_deployment import RemoteBackend
from tests.deployments.fake_backend import MODELS, FakeBackend, make_completed, make_png
from tests.support.waiting import until
from tridentserve.engine.live.updates import CompletedUpdate, ProgressUpdate, QueuedUpdate, Update
from tridentserve.errors import InvalidRequestError, OverloadedError, WorkerError
from tridentserve.requests import GenerationInputs, RequestSpec

ARGS = build_image_request({"prompt": "a cat", "size": "64x32", "num_inference_steps": 2, "request_id": "r1"}, MODELS)


def as_ray_does(error: Exception) -> Exception:
    """An exception of the other side as it arrives here."""
    ray_task_error: Any = RayTaskError
    arrives: Exception = ray_task_error("generate", f"Traceback over there: {error}", error).as_instanceof_cause()
    return arrives


class FakeHandle:
    """The part of a Ray `DeploymentHandle` that is used, over a backend in this process."""

    def __init__(self, backend: FakeBackend) -> None:
        self.responses: list[FakeResponse] = []
        self.ended_calls: list[str] = []
        self.lost: Exception | None = None
        self._backend = backend
        self.generate = SimpleNamespace(remote=self._generate)
        self.wait_for_end = SimpleNamespace(remote=self._wait_for_end)
        self.end_call = SimpleNamespace(remote=self._end_call)
        self.cancel = SimpleNamespace(remote=backend.cancel)
        self.get_health = SimpleNamespace(remote=backend.get_health)

    def options(self, stream: bool) -> FakeHandle:
        assert stream
        return self

    def _generate(self, spec: RequestSpec, inputs: GenerationInputs, call_id: str) -> FakeResponse:
        self.responses.append(FakeResponse(self._backend.generate(spec, inputs), call_id))
        return self.responses[-1]

    def _wait_for_end(self, spec: RequestSpec, inputs: GenerationInputs, call_id: str) -> FakeResponse:
        self.responses.append(FakeResponse(self._backend.generate(spec, inputs, with_progress=False), call_id))
        return self.responses[-1]

    async def _end_call(self, call_id: str) -> None:
        if self.lost is not None:
            raise self.lost
        self.ended_calls.append(call_id)


async def _fetch(image: bytes | Exception) -> bytes:
    if isinstance(image, Exception):
        raise image
    return image


def _with_references(update: Update) -> Update:
    if not isinstance(update, CompletedUpdate):
        return update
    return replace(update, outputs=tuple(_fetch(one) for one in update.outputs))


class FakeResponse:
    """Its images are references: awaitables, as Ray's are. A stream has all updates, in batches; an answer the last."""

    def __init__(self, updates: AsyncIterator[Update], call_id: str) -> None:
        self.cancelled = False
        self.call_id = call_id
        self._updates = updates

    async def __aiter__(self) -> AsyncIterator[list[Update]]:
        async for update in self._updates:
            yield [_with_references(update)]

    def __await__(self) -> Generator[Any, None, Update]:
        return self._wait().__await__()

    async def _wait(self) -> Update:
        *_, last = [update async for update in self._updates]
        return _with_references(last)

    def cancel(self) -> None:
        self.cancelled = True


async def test_updates_come_through() -> None:
    backend = FakeBackend()
    updates = [update async for update in RemoteBackend(FakeHandle(backend)).generate(*ARGS)]
    assert updates == [
        QueuedUpdate("r1"),
        ProgressUpdate("r1", 1, 2),
        ProgressUpdate("r1", 2, 2),
        replace(make_completed(*ARGS), outputs=(make_png(64, 32),)),
    ]
    assert backend.seen == [ARGS]


async def test_the_end_alone_comes_in_one_answer() -> None:
    handle = FakeHandle(FakeBackend())
    updates = [update async for update in RemoteBackend(handle).generate(*ARGS, with_progress=False)]
    assert updates == [replace(make_completed(*ARGS), outputs=(make_png(64, 32),))]
    await asyncio.sleep(0)
    assert not handle.ended_calls


async def test_leaving_while_the_answer_is_awaited_tells_the_scheduler() -> None:
    backend = FakeBackend(allowed_steps=0)
    handle = FakeHandle(backend)
    waiting = asyncio.create_task(wait_for_result(RemoteBackend(handle).generate(*ARGS, with_progress=False)))
    await until(lambda: "r1" in backend.running)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert handle.responses[0].cancelled
    await until(lambda: handle.ended_calls == [handle.responses[0].call_id])


async def test_leaving_cancels_the_remote_call_and_tells_the_scheduler() -> None:
    handle = FakeHandle(FakeBackend())
    async with closing(RemoteBackend(handle).generate(*ARGS)) as updates:
        await anext(updates)
        assert not handle.responses[0].cancelled
    assert handle.responses[0].cancelled
    await until(lambda: handle.ended_calls == [handle.responses[0].call_id])


async def test_a_client_that_stays_ends_no_call() -> None:
    handle = FakeHandle(FakeBackend())
    remote = RemoteBackend(handle)
    for _ in range(2):
        async with closing(remote.generate(*ARGS)) as updates:
            assert [update async for update in updates]
    await asyncio.sleep(0)
    assert not handle.ended_calls
    assert not any(response.cancelled for response in handle.responses)
    assert handle.responses[0].call_id != handle.responses[1].call_id


async def test_leaving_a_scheduler_that_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    handle = FakeHandle(FakeBackend())
    handle.lost = ActorDiedError()
    async with closing(RemoteBackend(handle).generate(*ARGS)) as updates:
        await anext(updates)
    await until(lambda: "was not told that a client has left" in caplog.text)


@pytest.mark.parametrize("error", [OverloadedError("full"), InvalidRequestError("too large", "size")])
async def test_errors_of_ours_lose_the_traceback_of_the_other_side(error: Exception) -> None:
    remote = RemoteBackend(FakeHandle(FakeBackend(refuse=as_ray_does(error))))
    with pytest.raises(type(error)) as caught:
        await anext(remote.generate(*ARGS))
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BackPressureError(num_queued_requests=9, max_queued_requests=9), OverloadedError),
        (ActorDiedError(), WorkerError),
        (as_ray_does(ValueError("a defect")), RayTaskError),
    ],
)
async def test_errors_of_ray(error: Exception, expected: type[Exception]) -> None:
    remote = RemoteBackend(FakeHandle(FakeBackend(refuse=error)))
    updates = remote.generate(*ARGS)
    assert isinstance(updates, AsyncGenerator)
    with pytest.raises(expected):
        await anext(updates)


async def test_an_image_that_is_lost() -> None:
    lost: Any = ObjectLostError
    image = lost("00" * 28, "", "")
    backend = FakeBackend(fail=replace(make_completed(*ARGS), outputs=(image,)))
    with pytest.raises(WorkerError, match="lost"):
        _ = [update async for update in RemoteBackend(FakeHandle(backend)).generate(*ARGS)]


async def test_cancel_and_health() -> None:
    backend = FakeBackend()
    remote = RemoteBackend(FakeHandle(backend))
    assert await remote.get_health() == {"status": "ready", "workers": 4}
    assert not await remote.cancel("r1")
    backend.state = as_ray_does(WorkerError("gone"))
    with pytest.raises(WorkerError, match=r"^gone$"):
        await remote.get_health()
