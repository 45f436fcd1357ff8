"""Bounds on input images that wait to be decoded, and on bytes that are held; the wait counts as latency."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from deployments.config.app import AppArgs
from deployments.http.python_handle import generate
from deployments.schemas import image_field as image_field
from deployments.schemas.image_limits import DecodingThreads, ImageBudget
from deployments.serve.scheduler_deployment import SchedulerDeployment
from tests.deployments.clients import get_error, open_image_client
from tests.deployments.fake_backend import WITH_IMAGES, FakeBackend, make_png
from tests.deployments.videos.test_store import request
from tests.support.waiting import PATIENCE_S, until
from tridentserve.engine.live.updates import FailedUpdate, QueuedUpdate
from tridentserve.errors import InvalidRequestError, OverloadedError, http_status_of
from tridentserve.models.input_image import read_image

EDITS = "/v1/images/edits"
SENT: dict[str, Any] = {
    "data": {"prompt": "x", "num_inference_steps": "1"},
    "files": {"image": ("fox.png", make_png(64, 48), "image/png")},
}


class Gate:
    """Work that continues when the gate is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = 0

    def __call__(self) -> None:
        self.reached += 1
        assert self.opened.wait(PATIENCE_S)

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*args: Any) -> Any:
            self()
            return call(*args)

        return gated


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Before every image that the API decodes, one at a time, with one more that may wait."""
    gate = Gate()
    monkeypatch.setattr(image_field, "_THREADS", DecodingThreads(max_threads=1, max_waiting=1))
    monkeypatch.setattr(image_field, "read_image", gate.before(read_image))
    return gate


async def test_images_beyond_those_that_may_wait_are_refused_at_once(gate: Gate) -> None:
    backend = FakeBackend()
    async with open_image_client(backend) as http:
        taken = [asyncio.create_task(http.post(EDITS, **SENT)) for _ in range(2)]
        await until(lambda: gate.reached == 1 and image_field._THREADS._unfinished == 2)
        for path, sent in (
            (EDITS, SENT),
            ("/v1/videos/sync", {**SENT, "files": {"input_reference": make_png(64, 48)}}),
        ):
            refused = await http.post(path, **sent)
            assert (refused.status_code, get_error(refused)["code"]) == (429, "overloaded")
            assert int(refused.headers["retry-after"]) > 0
        with pytest.raises(OverloadedError, match="2 images are to be decoded already"):
            await generate(backend, WITH_IMAGES, {"prompt": "x", "image": make_png(64, 48)})
        gate.opened.set()
        assert [(await answer).status_code for answer in taken] == [200, 200]
        assert (await http.post(EDITS, **SENT)).status_code == 200
    assert len(backend.seen) == 3


async def test_a_cancelled_call_waits_no_more() -> None:
    threads, gate = DecodingThreads(max_threads=1, max_waiting=1), Gate()
    running, waiting = (asyncio.create_task(threads.run(gate)) for _ in range(2))
    await until(lambda: gate.reached == 1 and threads._unfinished == 2)
    waiting.cancel()
    await until(lambda: threads._unfinished == 1)
    gate.opened.set()
    await running
    assert await threads.run(lambda: 7) == 7
    assert gate.reached == 1


async def test_the_wait_for_a_decoder_counts() -> None:
    made, start_s = request("r", image=b"png"), time.monotonic()
    waited, _ = await image_field.build_beside_loop(lambda: made, True, start_s - 5.0)
    assert 5.0 <= waited.waited_s <= 5.0 + time.monotonic() - start_s
    assert waited == made[0]  # for a client that asks again with the same id
    assert (await image_field.build_beside_loop(lambda: made, False, 0.0))[0].waited_s == 0.0
    backend = FakeBackend()
    async with open_image_client(backend) as http:
        await http.post(EDITS, **SENT)
    await generate(backend, WITH_IMAGES, {"prompt": "x", "image": make_png(64, 48), "num_inference_steps": 1})
    assert all(0.0 < spec.waited_s <= time.monotonic() - start_s for spec, _ in backend.seen)


async def test_an_error_in_a_thread_is_reported() -> None:
    def broken() -> None:
        raise InvalidRequestError("image: is no image", "image")

    with pytest.raises(InvalidRequestError, match="no image"):
        await DecodingThreads().run(broken)


def test_room_for_bytes() -> None:
    budget = ImageBudget(100)
    assert budget.has_room([bytes(1000)])  # alone it has room, however large
    with budget.hold([bytes(50), bytes(10)]):
        assert (budget.has_room([bytes(40)]), budget.has_room([bytes(40), b"x"]), budget.has_room([])) == (
            True,
            False,
            True,
        )
        with budget.hold([]), budget.hold([bytes(40)]):
            assert not budget.has_room([b"x"])
        assert budget.has_room([bytes(40)])
    assert budget.has_room([bytes(1000)])


class Replica(SchedulerDeployment):
    def __del__(self) -> None:  # type: ignore[override]
        """Ray Serve awaits that of `SchedulerDeployment`; nobody does here."""


async def test_the_scheduler_refuses_images_that_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.serve.scheduler_deployment.MAX_HELD_BYTES", 100)
    args = {"models": [{"name": "m", "tiny": "flux_kontext"}], "cluster": {"workers_per_node": 1, "memory_mb": 512}}
    scheduler = Replica(AppArgs.model_validate({**args, "placement": ["EDC"]}))
    backend = FakeBackend(allowed_steps=0)
    monkeypatch.setattr(scheduler, "_require_engine", lambda: backend)

    async def first(job_id: str, image: bytes | None) -> tuple[Any, AsyncIterator[Any]]:
        updates = scheduler.generate_in_batches(*request(job_id, image=image), with_progress=True)
        (told,) = await anext(updates)
        return told, updates

    told, held = await first("a", bytes(60))
    assert isinstance(told, QueuedUpdate)
    told, _ = await first("b", bytes(60))
    assert isinstance(told, FailedUpdate)
    assert (http_status_of(told.code), told.code) == (429, "overloaded")
    for name, image in (("c", None), ("d", bytes(40))):
        assert isinstance((await first(name, image))[0], QueuedUpdate)
    await held.aclose()  # type: ignore[attr-defined]
    assert isinstance((await first("b", bytes(60)))[0], QueuedUpdate)
