"""GET /v1/handle: where the Python handle of a service is."""

from __future__ import annotations

import httpx

from deployments.http.app import create_api
from deployments.http.routes.handle_routes import HandleAddress
from tests.deployments.fake_backend import MODELS, FakeBackend


async def test_a_service_says_where_its_handle_is() -> None:
    address = HandleAddress("painter", "serve", "10.0.0.1:6379", "token")
    answer = await _get_handle(address)
    assert answer.json() == {
        "application": "painter",
        "namespace": "serve",
        "ray_address": "10.0.0.1:6379",
        "ray_auth_mode": "token",
    }


async def test_a_service_without_ray_has_none() -> None:
    answer = await _get_handle(None)
    assert answer.status_code == 404
    assert "Ray Serve" in answer.json()["error"]["message"]


async def _get_handle(address: HandleAddress | None) -> httpx.Response:
    transport = httpx.ASGITransport(app=create_api(FakeBackend(), MODELS, handle=address))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.get("/v1/handle")
