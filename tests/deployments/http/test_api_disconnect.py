"""Clients that leave, against a real server: their request is told at once, its iterator is closed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from tests.deployments.clients import IMAGES, api, events, raw_request, served, until
from tests.deployments.fake_backend import FakeBackend

SLOW = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 50, "request_id": "slow"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    backend = FakeBackend(step_s=8)
    async with served(backend) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw_request({**SLOW, "stream": stream}))
        await until(lambda: "slow" in backend.running)
        left_s = time.monotonic()
        writer.close()
        await until(lambda: not backend.running)
        assert time.monotonic() - left_s < 4  # well within the step
        assert backend.ended["slow"] == "cancelled"


async def test_half_of_many_clients_leave() -> None:
    backend = FakeBackend(step_s=0.005)
    async with served(backend) as port:

        async def leave(number: int) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw_request({**SLOW, "request_id": f"leaves-{number}", "stream": number % 4 == 0}))
            await asyncio.sleep(0.004 * number)
            writer.close()

        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            stays = [http.post(IMAGES, json={**SLOW, "request_id": f"stays-{number}"}) for number in range(20)]
            answers = await asyncio.gather(*stays, *(leave(number) for number in range(20)))
        assert all(isinstance(answer, httpx.Response) and answer.status_code == 200 for answer in answers[:20])
        await until(lambda: not backend.running)


async def test_a_cancelled_handler_ends_its_request() -> None:
    """What Ray Serve does when a client leaves."""
    backend = FakeBackend(step_s=8)
    transport = httpx.ASGITransport(api(backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for stream in (False, True):
            call = asyncio.create_task(http.post(IMAGES, json={**SLOW, "stream": stream}))
            await until(lambda: "slow" in backend.running)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not backend.running


async def test_events_come_as_they_happen_with_heartbeats_between() -> None:
    backend = FakeBackend(step_s=0.25)
    lines: list[tuple[float, str]] = []
    async with served(backend, heartbeat_s=0.1) as port, httpx.AsyncClient(timeout=30) as http:
        body: dict[str, Any] = {**SLOW, "num_inference_steps": 3, "stream": True}
        async with http.stream("POST", f"http://127.0.0.1:{port}{IMAGES}", json=body) as answer:
            lines += [(time.monotonic(), line) async for line in answer.aiter_lines()]
    text = "\n".join(line for _, line in lines)
    assert [name for name, _ in events(text)][-1] == "image_generation.completed"
    steps = [when for when, line in lines if line == "event: image_generation.progress"]
    assert len(steps) == 3
    assert steps[2] - steps[0] > 0.3
    assert sum(line.startswith(":") for _, line in lines) >= 3


async def test_a_deleted_request_is_answered_with_499() -> None:
    backend = FakeBackend(step_s=0.2)
    async with served(backend) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        call = asyncio.create_task(http.post(IMAGES, json=SLOW))
        await until(lambda: "slow" in backend.running)
        answer = await http.delete("/v1/requests/slow")
        assert answer.json() == {"id": "slow", "object": "request.deleted", "deleted": True}
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
