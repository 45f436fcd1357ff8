"""Clients that leave, against a real server: their request is cancelled at once, its iterator is closed."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import pytest

from tests.deployments.clients import IMAGES, make_api, make_raw_request, parse_events, served
from tests.deployments.fake_backend import FakeBackend
from tests.support.waiting import PATIENCE_S, until

SLOW = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 50, "request_id": "slow"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    backend = FakeBackend(allowed_steps=0)
    async with served(backend) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(make_raw_request({**SLOW, "stream": stream}))
        await until(lambda: "slow" in backend.running)
        writer.close()
        await until(lambda: not backend.running)  # in the middle of a step, which never ends
        assert backend.ended["slow"] == "cancelled"


async def test_half_of_many_clients_leave() -> None:
    """Some as soon as they have asked, some while they are served."""
    backend = FakeBackend(allowed_steps=0)
    async with served(backend) as port:

        async def leave(number: int) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(make_raw_request({**SLOW, "request_id": f"leaves-{number}", "stream": number % 4 == 0}))
            if number % 3:
                await until(lambda: f"leaves-{number}" in backend.running)
            writer.close()

        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http:
            stays = [
                asyncio.create_task(http.post(IMAGES, json={**SLOW, "request_id": f"stays-{number}"}))
                for number in range(20)
            ]
            await asyncio.gather(*(leave(number) for number in range(20)))
            backend.allowed_steps = math.inf
            assert [(await answer).status_code for answer in stays] == [200] * 20
        await until(lambda: not backend.running)


async def test_a_cancelled_handler_ends_its_request() -> None:
    """Ray Serve cancels the handler when a client leaves."""
    backend = FakeBackend(allowed_steps=0)
    transport = httpx.ASGITransport(make_api(backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for stream in (False, True):
            call = asyncio.create_task(http.post(IMAGES, json={**SLOW, "stream": stream}))
            await until(lambda: "slow" in backend.running)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not backend.running


async def test_events_come_as_they_happen_with_heartbeats_between() -> None:
    """No step is made before the events of the one before have come, and a heartbeat after them."""
    backend = FakeBackend(allowed_steps=0)
    step, lines, granted = "event: image_generation.progress", list[str](), 0
    async with served(backend, heartbeat_s=0.01) as port, httpx.AsyncClient() as http, asyncio.timeout(PATIENCE_S):
        body: dict[str, Any] = {**SLOW, "num_inference_steps": 3, "stream": True}
        async with http.stream("POST", f"http://127.0.0.1:{port}{IMAGES}", json=body, timeout=None) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if line.startswith(":") and lines.count(step) == granted:
                    granted += 1
                    backend.allowed_steps = 1
    assert [name for name, _ in parse_events("\n".join(lines))][-1] == "image_generation.completed"
    assert granted >= lines.count(step) == 3


async def test_a_deleted_request_is_answered_with_499() -> None:
    backend = FakeBackend(allowed_steps=0)
    async with served(backend) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None) as http:
        call = asyncio.create_task(http.post(IMAGES, json=SLOW))
        await until(lambda: "slow" in backend.running)
        answer = await http.delete("/v1/requests/slow")
        assert answer.json() == {"id": "slow", "object": "request.deleted", "deleted": True}
        backend.allowed_steps = 1
        answer = await call
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
        assert (await http.delete("/v1/requests/slow")).status_code == 404


async def test_a_large_body_is_refused_by_a_real_server() -> None:
    async with served(FakeBackend()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {IMAGES} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(17):
            writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        assert b" 413 " in await reader.readline()
        writer.close()
