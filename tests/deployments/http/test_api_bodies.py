"""Bodies as bytes: what is not JSON, not of the right type, or too large, is refused before it is looked at."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator

import pytest

from tests.deployments.clients import IMAGES, get_error, open_client
from tests.deployments.fake_backend import FakeBackend

BODY = {"prompt": "a cat", "size": "64x32", "num_inference_steps": 2, "request_id": "r1", "seed": 7}
JSON = {"Content-Type": "application/json"}
NOT_JSON = [
    b"",
    b"{",
    b"{} {}",
    b'{"prompt": "a", "guidance_scale": NaN}',
    b'{"prompt": "a", "slo_ms": -Infinity}',
    b'{"prompt": "\xff"}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b"[" * 200_000,
    "{}".encode("utf-16"),
]


@pytest.mark.parametrize("content", NOT_JSON)
async def test_what_is_not_json(content: bytes) -> None:
    async with open_client(FakeBackend()) as http:
        answer = await http.post(IMAGES, content=content, headers=JSON)
    assert answer.status_code == 422
    assert get_error(answer)["code"] == "invalid_request"
    assert "not valid JSON" in get_error(answer)["message"]


@pytest.mark.parametrize("content", [b"[]", b"null", b'"x"', b"1e999", b'{"prompt": "\\ud800"}', b'{"\\ud800": 1}'])
async def test_json_that_is_no_request(content: bytes) -> None:
    async with open_client(FakeBackend()) as http:
        assert (await http.post(IMAGES, content=content, headers=JSON)).status_code == 422


def make_body(size: int) -> bytes:
    """A good body of exactly `size` bytes."""
    content = json.dumps(BODY).encode()
    return content + b" " * (size - len(content))


@pytest.mark.parametrize(("size", "status"), [(2**20 - 1, 200), (2**20, 200), (2**20 + 1, 413), (5 * 2**20, 413)])
@pytest.mark.parametrize("chunked", [False, True])
async def test_size_of_the_body(size: int, status: int, chunked: bool) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        content = make_body(size)
        for start in range(0, size, 65536):
            sent += len(content[start : start + 65536])
            yield content[start : start + 65536]

    async with open_client(FakeBackend()) as http:
        answer = await http.post(IMAGES, content=chunks() if chunked else make_body(size), headers=JSON)
    assert answer.status_code == status
    if status == 413:
        assert get_error(answer)["code"] == "body_too_large"
        assert sent <= 2**20 + 65536


@pytest.mark.parametrize("length", ["1048577", "9" * 30])
async def test_an_announced_size_is_refused_unread(length: str) -> None:
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async with open_client(FakeBackend()) as http:
        answer = await http.post(IMAGES, content=unread(), headers={**JSON, "Content-Length": length})
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "Application/JSON; charset=UTF-8"}, 200),
        ({"Content-Type": 'application/json; charset="utf-8"', "Content-Encoding": "identity"}, 200),
        ({"Content-Type": "application/json; charset=utf-16"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": "text/json"}, 415),
        ({"Content-Type": ""}, 415),
        ({}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "br"}, 415),
    ],
)
async def test_types_of_the_body(headers: dict[str, str], status: int) -> None:
    async with open_client(FakeBackend()) as http:
        answer = await http.post(IMAGES, content=json.dumps(BODY), headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert get_error(answer)["code"] == "unsupported_media_type"


async def test_a_compressed_body_is_not_unpacked() -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    async with open_client(FakeBackend()) as http:
        headers = {**JSON, "Content-Encoding": "gzip"}
        assert (await http.post(IMAGES, content=bomb, headers=headers)).status_code == 415
        assert (await http.post(IMAGES, content=bomb, headers=JSON)).status_code == 422
