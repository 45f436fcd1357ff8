"""The page at /docs has every route and field of the OpenAPI document, and needs no other server."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import httpx

from tests.deployments.clients import make_api
from tests.deployments.fake_backend import FakeBackend


async def _get_page(root_path: str = "") -> tuple[str, dict[str, Any]]:
    api = make_api(FakeBackend())
    transport = httpx.ASGITransport(app=api, root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.get(f"{root_path}/docs", headers={"Accept": "text/html"})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    return answer.text, api.openapi()["paths"]


async def test_it_has_all_routes_and_fields() -> None:
    page, paths = await _get_page()
    sections = dict(re.findall(r"<h2 id=\S+><code>(.*?)</code></h2>(.*?)(?=<h2 |</main>)", page, re.DOTALL))
    routes = {f"{method.upper()} {path}": route for path, methods in paths.items() for method, route in methods.items()}
    assert {unescape(name) for name in sections} == set(routes)
    for name, route in routes.items():
        fields = set(re.findall(r'<th scope="row"><code>(.*?)</code>', sections[name]))
        body = route.get("requestBody", {}).get("content", {}).get("application/json", {})
        assert set(body.get("schema", {}).get("properties", {})) <= fields
    images = unescape(sections["POST /v1/images/generations"])
    assert "b64_json | url | file" in images
    assert "integer, at least 0" in images
    assert "required" in images


async def test_it_needs_nothing_from_elsewhere() -> None:
    page, _ = await _get_page()
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="[a-z]+:', page)


async def test_its_links_keep_the_prefix_of_the_service() -> None:
    page, _ = await _get_page("/paint")
    assert all(link.startswith(("/paint/", "#")) for link in re.findall(r'href="(.*?)"', page))
