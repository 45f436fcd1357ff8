"""Images as answers of a chat: the body as vLLM-Omni's benchmark sends it, with an input image too."""

from __future__ import annotations

import base64
import re
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from tests.deployments.clients import get_error, open_image_client
from tests.deployments.fake_backend import FakeBackend, make_png
from tridentserve.requests import Shape

CHAT = "/v1/chat/completions"
DATA_URL = "data:image/png;base64," + base64.b64encode(make_png(64, 48)).decode()
TEXT = {"type": "text", "text": "a red fox"}


def make_body(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "draw"}, {"role": "user", "content": content}], **fields}


async def ask(backend: FakeBackend, body: Any) -> Any:
    async with open_image_client(backend) as http:
        return await http.post(CHAT, json=body)


@pytest.mark.parametrize("content", ["a red fox", [TEXT]])
async def test_a_text_becomes_images(content: Any) -> None:
    backend = FakeBackend()
    sampling = {"width": 64, "height": 32, "num_inference_steps": 2, "seed": 7, "num_outputs_per_prompt": 2}
    body = make_body(
        content, extra_body={**sampling, "true_cfg_scale": 4.0}, temperature=0.0, max_tokens=None, stream=False
    )
    answer = await ask(backend, body)
    assert answer.status_code == 200, answer.text
    ((spec, inputs),) = backend.seen
    assert (inputs.prompt, spec.shape, inputs.seed, spec.num_outputs) == ("a red fox", Shape(32, 64), 7, 2)
    found = answer.json()
    assert found["ignored"] == ["temperature", "true_cfg_scale"]
    (choice,) = found["choices"]
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "stop")
    for part in choice["message"]["content"]:
        head, _, content = part["image_url"]["url"].partition(",")
        assert head == "data:image/png;base64"
        assert Image.open(BytesIO(base64.b64decode(content))).size == (64, 32)
        assert set(part["stage_durations"]) == {"encode", "diffuse", "decode"}
        assert part["peak_memory_mb"] == 12.5
    assert len(choice["message"]["content"]) == 2
    assert found["id"] == f"chatcmpl-{spec.request_id}"


async def test_fields_of_chats_may_be_in_extra_body() -> None:
    extra = {"temperature": 1, "modalities": ["image"], "top_p": None, "size": "64x64"}
    body = {"messages": [{"role": "user", "content": "a red fox"}], "top_k": 3, "extra_body": extra}
    answer = await ask(FakeBackend(), body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["ignored"] == ["modalities", "temperature", "top_k"]


async def test_a_client_that_reads_texts_alone_gets_one() -> None:
    asked = {"size": "64x32", "num_inference_steps": 2, "n": 2}
    answer = await ask(FakeBackend(), make_body("a red fox", **asked, response_format={"type": "text"}))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    links = re.findall(r"!\[image (\d)\]\(data:image/png;base64,([^)]+)\)", choice["message"]["content"])
    assert [number for number, _ in links] == ["1", "2"]
    assert [Image.open(BytesIO(base64.b64decode(content))).size for _, content in links] == [(64, 32)] * 2
    assert "ignored" not in answer.json()
    other = await ask(FakeBackend(), make_body("a red fox", **asked, response_format={"type": "json_object"}))
    assert other.json()["ignored"] == ["response_format"]
    assert isinstance(other.json()["choices"][0]["message"]["content"], list)


@pytest.mark.parametrize("image", [{"url": DATA_URL}, DATA_URL])
async def test_a_text_with_an_image_is_an_edit(image: Any) -> None:
    backend = FakeBackend()
    answer = await ask(backend, make_body([TEXT, {"type": "image_url", "image_url": image}], num_inference_steps=2))
    assert answer.status_code == 200, answer.text
    ((spec, inputs),) = backend.seen
    assert (spec.model, inputs.prompt, inputs.image is not None) == ("tiny-kontext", "a red fox", True)


async def test_several_images_are_all_taken() -> None:
    backend, part = FakeBackend(), {"type": "image_url", "image_url": {"url": DATA_URL}}
    answer = await ask(backend, make_body([part, TEXT, part], model="tiny-plus"))
    assert answer.status_code == 200, answer.text
    ((spec, inputs),) = backend.seen
    assert (spec.model, inputs.prompt, len(inputs.images)) == ("tiny-plus", "a red fox", 2)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ([], None, "must be an object"),
        ({}, "messages", "a list with at least one message"),
        ({"messages": []}, "messages", "a list with at least one message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", 'role "user"'),
        (make_body(3), "messages", "a text, or a list of parts"),
        (make_body([{"type": "audio"}]), "messages", 'of type "text" or "image_url"'),
        (make_body(" "), "prompt", "must not be empty"),
        (make_body("x", prompt="y"), "prompt", "is the text of the last message"),
        (make_body("x", stream=True), "stream", "must be false"),
        (make_body("x", num_inference_step=3), "num_inference_step", "did you mean num_inference_steps?"),
        (make_body("x", temprature=1), "temprature", "did you mean temperature?"),
        (
            make_body([TEXT, {"type": "image_url", "image_url": {"url": "http://host/x.png"}}]),
            "image",
            "nothing is fetched",
        ),
    ],
)
async def test_what_is_refused(body: Any, param: str | None, says: str) -> None:
    backend = FakeBackend()
    answer = await ask(backend, body)
    assert answer.status_code == 422
    error = get_error(answer)
    assert error["param"] == param
    assert says in error["message"]
    assert not backend.seen
