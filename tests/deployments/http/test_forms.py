"""Forms and long bodies: what is in them, what is wrong with them, and that others are served while they are parsed."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.http.forms import MULTIPART, URLENCODED, parse_form
from deployments.schemas.common.fields import SentFile, show_name
from deployments.schemas.common.parsing import parse_as
from deployments.schemas.edit import EditRequest
from deployments.schemas.image_field import encode_input_image
from tests.deployments.clients import get_error, open_image_client
from tests.deployments.fake_backend import WITH_IMAGES, FakeBackend, make_png
from tests.support.work import calls_in
from tridentserve.errors import InvalidRequestError
from tridentserve.requests import Shape

EDITS = "/v1/images/edits"
TYPE = f"{MULTIPART}; boundary=B"
IMAGE = make_png(64, 48)


def make_form(*parts: tuple[str, bytes], end: bytes = b"--B--\r\n") -> bytes:
    """`parts`: what stands behind `form-data` in the header of each, and its content."""
    head = "--B\r\nContent-Disposition: form-data{}\r\n\r\n"
    return b"".join(head.format(about).encode() + content + b"\r\n" for about, content in parts) + end


async def post(content: bytes, kind: str) -> httpx.Response:
    async with open_image_client(FakeBackend()) as http:
        return await http.post(EDITS, content=content, headers={"Content-Type": kind})


async def test_texts_and_files() -> None:
    body = make_form(
        ('; name="prompt"', "ein Füchschen".encode()),
        ('; name="image[]"; filename="a.png"', b"a"),
        ('; name="image[]"; filename="b.png"', b"b"),
        ('; name="mask"', b"\x89PNG"),
        ('; name="tag[]"', b"x"),
    )
    assert await parse_form(body, TYPE) == {
        "prompt": "ein Füchschen",
        "image": [SentFile(b"a"), SentFile(b"b")],
        "mask": SentFile(b"\x89PNG"),  # no text, although its part has no file name
        "tag": "x",
    }
    assert await parse_form(b"prompt=ein+F%C3%BCchschen&seed=&x[]=1&x[]=2", URLENCODED) == {
        "prompt": "ein Füchschen",
        "seed": "",
        "x": ["1", "2"],
    }


@pytest.mark.parametrize(
    ("body", "kind", "param", "says"),
    [
        (make_form(('; name="prompt"', b"a"), ('; name="prompt"', b"b")), TYPE, "prompt", "prompt: is given twice"),
        (
            make_form(('; name="image"', b"a"), ('; name="image"; filename="a"', b"b")),
            TYPE,
            "image",
            "image: is given twice",
        ),
        (b"prompt=a&prompt=b", URLENCODED, "prompt", "prompt: is given twice"),
        (make_form(("", b"a")), TYPE, None, "has no name"),
        (make_form(('; name="a"', b"a")), MULTIPART, None, "names no boundary; let"),
        (make_form(('; name="a"', b"a")), f"{MULTIPART}; boundary=C", None, "cannot be separated by the boundary"),
        (make_form(('; name="a"', b"a")), f"{MULTIPART}; boundary={'C' * 500}", None, "cannot be separated"),
        (make_form(('; name="a"', b"a"), end=b""), TYPE, None, "is cut off"),
        (make_form(('; name="a"', b"a"))[:20], TYPE, None, "is cut off"),
        (b"", TYPE, None, "is cut off"),
        (make_form(*[(f'; name="a{number}"', b"") for number in range(65)]), TYPE, None, "more than 64 fields"),
        (b"&".join(b"a%d=" % number for number in range(65)), URLENCODED, None, "more than 64 fields"),
        (b"a=%ff", URLENCODED, None, "not UTF-8"),
        (b"a=\xff", URLENCODED, None, "not UTF-8"),
        (b"x" * 200 + b"=1&" + b"x" * 200 + b"=1", URLENCODED, "x" * 64 + "...", "x" * 64 + "...: is given twice"),
    ],
)
async def test_forms_that_are_broken(body: bytes, kind: str, param: str | None, says: str) -> None:
    answer = await post(body, kind)
    assert (answer.status_code, get_error(answer)["param"]) == (422, param)
    assert says in get_error(answer)["message"]


@pytest.mark.parametrize("count", [5, 16])
async def test_several_images_are_called_so(count: int) -> None:
    files = [("image[]", ("fox.png", IMAGE))] * count
    async with open_image_client(FakeBackend()) as http:
        answer = await http.post(EDITS, data={"prompt": "x"}, files=files)
    assert (answer.status_code, get_error(answer)["param"]) == (422, "image")
    assert f"has {count} images" in get_error(answer)["message"]


@given(
    st.lists(st.sampled_from([b"--B", b"\r\n", b"--", b"\r", b": ", b'Content-Disposition: form-data; name="a"', b"x"]))
)
def test_any_multipart_bytes(pieces: list[bytes]) -> None:
    with suppress(InvalidRequestError):
        assert isinstance(asyncio.run(parse_form(b"".join(pieces), TYPE)), dict)


def test_names_are_shown_short_and_plain() -> None:
    assert (show_name("seed"), show_name("é"), show_name(7)) == ("seed", "\\xe9", "7")
    assert show_name("a" * 64) == "a" * 64
    assert show_name("a" * 65) == "a" * 64 + "..."
    assert len(show_name("é" * 64)) == 67


async def test_others_are_served_while_a_form_is_parsed() -> None:
    """Bytes that nearly are a boundary, again and again, are the slowest to parse."""
    turns, body = 0, make_form(('; name="image"; filename="a"', b"\r\n--Bx" * 100_000))

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    serving = asyncio.create_task(others())
    fields = await parse_form(body, TYPE)
    serving.cancel()
    assert len(fields["image"].content) == 600_000
    assert turns >= len(body) // (16 * 1024)


async def test_a_urlencoded_form_has_no_room_for_a_large_image() -> None:
    assert (await post(b"prompt=" + b"x" * (2**20 - 7), URLENCODED)).status_code == 422
    answer = await post(b"&" * (2**20 + 1), URLENCODED)
    assert (answer.status_code, get_error(answer)["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    "padding",
    [
        "[" + "[]," * 400_000 + "[]]",
        json.dumps(dict.fromkeys(map(str, range(100_000)), 0)),
        '"' + "\\n" * 600_000 + '"',
    ],
)
async def test_a_long_body_of_many_small_values_is_not_parsed(padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unparsed(*_: Any, **__: Any) -> None:
        raise AssertionError("it was parsed")

    body = f'{{"prompt": "x", "image": {padding}}}'
    assert len(body) > 2**20
    in_a_form = make_form(('; name="image"; filename="a"', IMAGE), ('; name="extra_body"', body.encode()))
    monkeypatch.setattr("deployments.http.body.json", SimpleNamespace(loads=unparsed))
    for content, kind in ((body.encode(), "application/json"), (in_a_form, TYPE)):
        answer = await post(content, kind)
        assert (answer.status_code, get_error(answer)["code"]) == (413, "body_too_large")
        assert "may hold an image and few other values" in get_error(answer)["message"]


async def test_a_long_body_may_be_written_as_some_clients_do() -> None:
    """With slashes that are escaped, and line breaks in the base64."""
    escaped = "A" * 60 + "\\/" + "A" * 14 + "\\n"
    answer = await post(f'{{"prompt": "x", "image": "{escaped * 15_000}"}}'.encode(), "application/json")
    assert (answer.status_code, get_error(answer)["param"]) == (422, "image")  # the file is too large for this model


def test_a_text_is_checked_as_a_whole() -> None:
    """And not by a step of Python per character, before it is known to be too long."""
    body = {"prompt": "x" * 100_000, "image": IMAGE}
    assert calls_in(lambda: parse_as(EditRequest, body)) < 1000
    spaced = "AA AA " * 20_000

    def read() -> None:
        with pytest.raises(InvalidRequestError, match="cannot be read"):
            encode_input_image(spaced, WITH_IMAGES["tiny-kontext"], "image", lambda width, height: Shape(height, width))

    assert calls_in(read) < 10_000
