"""Bodies and routes of other servers' clients: what has a meaning here gets it, what has none is taken and named."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from io import BytesIO
from typing import Any

import httpx
import pytest
from PIL import Image

from deployments.http.app import create_api
from tests.deployments.clients import IMAGES, open_client, open_video_client, parse_events
from tests.deployments.fake_backend import MODELS, WITH_VIDEOS, FakeBackend

# The fields of images that SGLang's client sends, with the defaults of its schema.
OF_SGLANG: dict[str, Any] = {
    "n": 1,
    "quality": "auto",
    "response_format": "url",
    "size": "64x64",
    "style": "vivid",
    "background": "auto",
    "output_format": None,
    "user": None,
    "num_inference_steps": None,
    "guidance_scale": None,
    "true_cfg_scale": None,
    "seed": 1024,
    "generator_device": "cuda",
    "negative_prompt": None,
    "output_quality": "default",
    "output_compression": None,
    "enable_teacache": False,
    "rollout": False,
    "rollout_sde_type": "sde",
    "diffusers_kwargs": None,
}


async def ask(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    async with open_client(FakeBackend()) as http:
        answer = await http.post(IMAGES, json={"prompt": "a cat", **body, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, "b64_json"),
        ({"quality": "high"}, "b64_json"),
        ({"quality": "standard"}, "url"),
        ({"quality": "hd", "response_format": None}, "url"),
        ({"quality": "hd", "response_format": "b64_json"}, "b64_json"),
        ({"quality": "low", "response_format": "url"}, "url"),
    ],
    ids=str,
)
async def test_a_quality_of_dall_e_has_its_form_of_answer(fields: dict[str, Any], form: str) -> None:
    (image,) = (await ask({"size": "64x64"}, **fields))["data"]
    assert list(image) == [form]


async def test_the_whole_schema_of_another_server_is_taken() -> None:
    found = await ask(OF_SGLANG, model="default")
    assert found["model"] == next(iter(MODELS))
    assert found["ignored"] == [
        "background",
        "enable_teacache",
        "generator_device",
        "output_quality",
        "rollout",
        "rollout_sde_type",
        "style",
    ]
    head, _, content = found["data"][0]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert Image.open(BytesIO(base64.b64decode(content))).size == (64, 64)


async def test_nothing_is_ignored_of_a_body_of_ours() -> None:
    found = await ask({"size": "64x64", "return_stage_metrics": True})
    assert "ignored" not in found
    assert set(found["stage_durations"]) == {"encode", "diffuse", "decode"}


@pytest.mark.parametrize("name", ["jpeg", "webp"])
async def test_a_format_and_its_quality_reach_the_worker(name: str) -> None:
    backend = FakeBackend()
    async with open_client(backend) as http:
        body = {"prompt": "a cat", "size": "64x64", "output_format": name, "output_compression": 60, "n": 2}
        answer = (await http.post(IMAGES, json=body)).json()
    ((_, inputs),) = backend.seen
    assert (inputs.output_format, inputs.compression) == (name, 60)
    assert answer["output_format"] == name
    formats = [Image.open(BytesIO(base64.b64decode(entry["b64_json"]))).format for entry in answer["data"]]
    assert formats == [name.upper()] * 2


async def test_a_compression_that_a_png_does_not_have_is_named() -> None:
    assert (await ask({"size": "64x64"}, output_compression=60))["ignored"] == ["output_compression"]
    assert "ignored" not in await ask({"size": "64x64"}, output_compression=60, output_format="webp")


async def test_the_last_events_of_a_stream_name_what_was_ignored() -> None:
    async with open_client(FakeBackend()) as http:
        body = {"prompt": "a cat", "size": "64x64", "stream": True, "style": "vivid"}
        answer = await http.post(IMAGES, json=body)
    *others, (_, last) = parse_events(answer.text)
    assert last["ignored"] == ["style"]
    assert not any("ignored" in data for _, data in others)


async def test_a_stream_has_the_partial_images_that_are_asked_for() -> None:
    body = {"prompt": "a cat", "size": "64x64", "n": 2, "output_format": "webp", "num_inference_steps": 4}
    async with open_client(FakeBackend()) as http:
        answer = await http.post(IMAGES, json={**body, "stream": True, "partial_images": 2})
        plain = await http.post(IMAGES, json={**body, "stream": True, "partial_images": 0})
        unseen = await http.post(IMAGES, json={**body, "partial_images": 2, "preview_interval_ms": 500})
    events = parse_events(answer.text)
    partial = [data for name, data in events if name == "image_generation.partial_image"]
    assert [(data["partial_image_index"], data["index"], data["step"]) for data in partial] == [
        (0, 0, 1),
        (0, 1, 1),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert {data["num_steps"] for data in partial} == {4}
    picture = Image.open(BytesIO(base64.b64decode(partial[0]["b64_json"])))
    assert (picture.format, picture.size, partial[0]["output_format"]) == ("WEBP", (8, 8), "webp")
    assert "ignored" not in events[-1][1]
    assert not any("partial" in name for name, _ in parse_events(plain.text))
    assert unseen.json()["ignored"] == ["partial_images", "preview_interval_ms"], "they need a stream"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"partial_images": 4}, "partial_images: Input should be less than or equal to 3"),
        ({"partial_images": -1}, "partial_images: Input should be greater than or equal to 0"),
        ({"preview_interval_ms": 10}, "preview_interval_ms: Input should be greater than or equal to 100"),
    ],
)
async def test_too_many_previews_are_refused(fields: dict[str, int], message: str) -> None:
    async with open_client(FakeBackend()) as http:
        answer = await http.post(IMAGES, json={"prompt": "a cat", "stream": True, **fields})
    assert (answer.status_code, answer.json()["error"]["message"]) == (422, message)


async def test_a_video_job_names_what_was_ignored() -> None:
    async with open_video_client(FakeBackend(), None) as http:
        form = {
            "prompt": "a cat",
            "size": "64x64",
            "num_frames": "5",
            "flow_shift": "3",
            "return_stage_metrics": "true",
            "bot_task": "image",
        }
        answer = await http.post("/v1/videos/sync", data=form)
        refused = await http.post("/v1/videos/sync", data={**form, "flow_shfit": "3"})
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.headers["X-Request-Facts"])["ignored"] == ["bot_task"]
    assert "did you mean flow_shift?" in refused.json()["error"]["message"]


async def test_a_strict_service_refuses_them() -> None:
    app = create_api(FakeBackend(), WITH_VIDEOS, lenient=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        image = await http.post(IMAGES, json={"prompt": "a cat", "style": "vivid"})
        video = await http.post("/v1/videos/sync", json={"prompt": "a cat", "boundary_ratio": 0.5})
    assert [answer.status_code for answer in (image, video)] == [422, 422]
    assert [answer.json()["error"]["param"] for answer in (image, video)] == ["style", "boundary_ratio"]


async def test_routes_that_other_clients_ask() -> None:
    name = next(iter(MODELS))
    async with open_client(FakeBackend()) as http:
        models = (await http.get("/v1/models")).json()["data"]
        assert (await http.get(f"/v1/models/{name}")).json() == models[0]
        assert (await http.get("/v1/model_info")).json() == {"model_path": name}
        assert (await http.get("/model_info")).json() == {"model_path": name}
        assert (await http.get("/live")).status_code == 200
        assert (await http.get("/ready")).json() == (await http.get("/health")).json()
        missing = await http.get("/v1/models/gpt-4o")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_model_is_found_by_the_folder_that_a_benchmark_is_told() -> None:
    """SGLang's looks whether the path of `/v1/model_info` is there, and sends it as the model."""
    (name, model), *others = MODELS.items()
    models = {name: replace(model, origin="/models/of-the-first"), **dict(others)}
    backend = FakeBackend()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_api(backend, models)), base_url="http://t"
    ) as http:
        path = (await http.get("/v1/model_info")).json()["model_path"]
        answer = await http.post(IMAGES, json={"prompt": "a cat", "size": "64x64", "model": path})
        unknown = await http.post(IMAGES, json={"prompt": "a cat", "size": "64x64", "model": path + "x"})
    assert (path, answer.json()["model"]) == ("/models/of-the-first", name)
    assert unknown.status_code == 404


async def test_a_service_that_is_not_ready_lives() -> None:
    backend = FakeBackend()
    backend.state = {"status": "starting", "workers": 0}
    async with open_client(backend) as http:
        assert [(await http.get(path)).status_code for path in ("/live", "/ready", "/health")] == [200, 503, 503]


@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("POST", "/v1/images/variations", "/v1/images/edits"),
        ("POST", "/v1/videos/video_1/remix", "POST /v1/videos"),
        ("GET", "/v1/engines", "GET / lists"),
    ],
)
async def test_routes_without_a_meaning_are_refused_in_words(method: str, path: str, instead: str) -> None:
    async with open_client(FakeBackend()) as http:
        answer = await http.request(method, path, json={})
    assert answer.status_code == 404
    assert instead in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "not_found"


async def test_the_metrics_are_pointed_to_in_words_that_are_no_metrics() -> None:
    async with open_client(FakeBackend()) as http:
        answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "prom_metrics_service_discovery.json" in answer.text
    assert all(line.startswith("# ") for line in answer.text.splitlines())


async def test_the_openapi_document_has_no_dangling_reference() -> None:
    async with open_client(FakeBackend()) as http:
        document = (await http.get("/openapi.json")).json()

    def list_references(value: Any) -> list[str]:
        if isinstance(value, list):
            return [found for each in value for found in list_references(each)]
        if not isinstance(value, dict):
            return []
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [found for each in value.values() for found in list_references(each)]

    for reference in list_references(document):
        place = document
        for name in reference.removeprefix("#/").split("/"):
            place = place[name]
    for path in ("/v1/images/generations", "/v1/images/edits", "/v1/videos", "/v1/chat/completions"):
        assert document["paths"][path]["post"]["requestBody"]["content"], path
