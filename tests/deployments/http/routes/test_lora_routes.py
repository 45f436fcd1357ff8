"""LoRAs over HTTP: whoever has the administrator's token changes them, anybody sees their names."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from deployments.config.models import Limits
from deployments.http.app import create_api
from deployments.http.routes.lora_routes import ADMIN_TOKEN
from deployments.models.served import ServedModel
from tests.deployments.clients import open_client
from tests.deployments.fake_backend import FakeBackend, make_loras
from tridentserve.models.families import FAMILIES

LORAS = "/v1/models/tiny-flux/loras"
TOKEN = {"Authorization": "Bearer secret"}
NEW = {"name": "chalk", "path": "/loras/chalk.safetensors"}


@pytest.fixture
def with_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_TOKEN, "secret")


async def post(
    body: Any, headers: dict[str, str], path: str = LORAS, **sent: Any
) -> tuple[httpx.Response, FakeBackend]:
    backend = FakeBackend()
    async with open_client(backend) as client:
        return await client.post(path, headers=headers, **({"json": body} | sent)), backend


async def test_the_names_are_public_and_paths_are_not() -> None:
    async with open_client(FakeBackend()) as client:
        answer = await client.get(LORAS)
        absent = await client.get("/v1/models/none/loras")
    ink, pastel = answer.json()["data"]
    assert ink == {"id": "ink", "object": "lora", "model": "tiny-flux", "sha256": None}
    assert pastel["id"] == "pastel"
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "model_not_found")


async def test_one_is_added_and_removed(with_token: None) -> None:
    answer, backend = await post(NEW, TOKEN)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"id": "chalk", "object": "lora", "model": "tiny-flux", "sha256": "0" * 64}
    assert list(backend.loras) == [("tiny-flux", "chalk")]
    async with open_client(backend) as client:
        gone = await client.delete(f"{LORAS}/ink", headers=TOKEN)
        absent = await client.delete(f"{LORAS}/none", headers=TOKEN)
    assert gone.json() == {"id": "ink", "object": "lora.deleted", "deleted": True}
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "lora_not_found")


@pytest.mark.parametrize("name", ["black-forest-labs/FLUX.1-dev", "black-forest-labs%2FFLUX.1-dev"])
async def test_a_name_may_have_a_slash(with_token: None, name: str) -> None:
    model = "black-forest-labs/FLUX.1-dev"
    served = ServedModel(model, FAMILIES["flux"], Limits(), loras=make_loras(model, "ink"))
    backend = FakeBackend()
    app = create_api(backend, {model: served})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        described = await client.get(f"/v1/models/{name}")
        listed = await client.get(f"/v1/models/{name}/loras")
        added = await client.post(f"/v1/models/{name}/loras", headers=TOKEN, json=NEW)
        gone = await client.delete(f"/v1/models/{name}/loras/ink", headers=TOKEN)
    assert described.json()["id"] == model
    assert [lora["id"] for lora in listed.json()["data"]] == ["ink"]
    assert (added.status_code, added.json()["model"]) == (200, model)
    assert gone.json() == {"id": "ink", "object": "lora.deleted", "deleted": True}
    assert list(backend.loras) == [(model, "chalk")]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}], ids=str)
async def test_nobody_else_changes_them(with_token: None, headers: dict[str, str]) -> None:
    answer, backend = await post(NEW, headers)
    async with open_client(backend) as client:
        deleted = await client.delete(f"{LORAS}/ink", headers=headers)
    for refused in (answer, deleted):
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")
    assert backend.loras == {}


@pytest.mark.parametrize("token", [None, ""])
async def test_without_a_token_nobody_does(monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    monkeypatch.delenv(ADMIN_TOKEN, raising=False)
    if token is not None:
        monkeypatch.setenv(ADMIN_TOKEN, token)
    answer, _ = await post(NEW, {"Authorization": "Bearer "})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_disabled")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (NEW | {"path": "/odd/chalk.safetensors"}, 422, "path"),
        (NEW | {"name": "../chalk"}, 422, "name"),
        (NEW | {"name": ""}, 422, "name"),
        (NEW | {"path": "a\0b"}, 422, "path"),
        (NEW | {"scale": 1}, 422, "scale"),
        ({"name": "chalk"}, 422, "path"),
        ([], 422, "body"),
    ],
    ids=str,
)
async def test_odd_ones_are_refused(with_token: None, body: Any, status: int, param: str) -> None:
    answer, backend = await post(body, TOKEN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert backend.loras == {}


async def test_unknown_models_and_other_bodies_are_refused(with_token: None) -> None:
    unknown, _ = await post(NEW, TOKEN, "/v1/models/none/loras")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    no_json, _ = await post(NEW, TOKEN, json=None, content=b"name=chalk")
    assert no_json.status_code == 415
