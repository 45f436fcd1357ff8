"""Explanations over HTTP and by the Python handle."""

from __future__ import annotations

import pytest

from deployments.http.python_handle import explain
from tests.deployments.clients import IMAGES, open_client
from tests.deployments.fake_backend import FakeBackend
from tridentserve.errors import RequestNotFoundError


async def test_a_request_is_explained_by_its_id() -> None:
    backend = FakeBackend()
    async with open_client(backend) as client:
        body = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 1, "request_id": "late-1"}
        assert (await client.post(IMAGES, json=body)).status_code == 200
        answer = await client.get("/v1/requests/late-1/explain")
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"object": "request.explanation", "id": "late-1", "text": "late-1 was made up"}
    assert await explain(backend, "late-1") == answer.json()


@pytest.mark.parametrize("request_id", ["nobody", "a~1", "x" * 300])
async def test_a_request_that_is_not_kept(request_id: str) -> None:
    """404 with the reason; the scheduler's own keys are nobody's ids."""
    async with open_client(FakeBackend()) as client:
        answer = await client.get(f"/v1/requests/{request_id}/explain")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"
    with pytest.raises(RequestNotFoundError):
        await explain(FakeBackend(), request_id)
