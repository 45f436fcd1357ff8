"""Bodies as vLLM-Omni's clients send them, with all fields of its schemas: what has a meaning here gets it."""

from __future__ import annotations

import base64
import io
import json
from typing import Any
from zipfile import ZipFile

import httpx
import pytest
from PIL import Image

from tests.deployments.clients import IMAGES, open_client, open_image_client, open_video_client
from tests.deployments.fake_backend import FakeBackend, make_png

# What its schemas have in addition to what OpenAI has, with values that a client may send.
OF_IMAGES: dict[str, Any] = {
    "model": "tiny-flux",
    "prompt": "a cat",
    "n": 2,
    "size": "64x64",
    "response_format": "b64_json",
    "user": "bench",
    "bot_task": "cot",
    "layers": 2,
    "negative_prompt": "a dog",
    "system_prompt": "paint",
    "use_system_prompt": "custom",
    "num_inference_steps": 4,
    "guidance_scale": 3.0,
    "true_cfg_scale": 4.0,
    "flow_shift": 3.0,
    "extra_params": {"a": 1},
    "infer_align_image_size": True,
    "seed": 7,
    "generator_device": "cpu",
    "lora": {"name": "ink", "path": "/loras/ink", "scale": 0.5, "int_id": 3},
    "vae_use_slicing": False,
    "vae_use_tiling": False,
    "output_format": "png",
}
OF_VIDEOS: dict[str, Any] = {
    "model": "tiny-wan",
    "prompt": "a cat",
    "video_params": {"width": 64, "height": 48, "num_frames": 9, "fps": 8},
    "user": "bench",
    "negative_prompt": "a dog",
    "num_inference_steps": 4,
    "guidance_scale": 3.0,
    "guidance_scale_2": 2.0,
    "boundary_ratio": 0.5,
    "flow_shift": 5.0,
    "true_cfg_scale": 4.0,
    "seed": 7,
    "generate_sound": False,
    "sound_duration": 1.0,
    "enable_frame_interpolation": False,
    "frame_interpolation_exp": 1,
    "frame_interpolation_scale": 1.0,
    "frame_interpolation_model_path": "/rife",
    "extra_params": {"a": 1},
}


async def post(http: httpx.AsyncClient, path: str, **sent: Any) -> httpx.Response:
    async with http:
        answer = await http.post(path, **sent)
    assert answer.status_code == 200, answer.text
    return answer


async def test_a_body_of_images() -> None:
    backend = FakeBackend()
    answer = (await post(open_client(backend), IMAGES, json=OF_IMAGES)).json()
    ((spec, inputs),) = backend.seen
    assert (spec.model, spec.num_outputs, inputs.seed, inputs.guidance_scale) == ("tiny-flux", 2, 7, 3.0)
    assert [(use.file.name, use.scale) for use in inputs.loras] == [("ink", 0.5)]
    with_effect = {
        *("model", "prompt", "n", "size", "response_format", "num_inference_steps", "guidance_scale", "seed"),
        *("lora", "output_format"),
    }
    assert set(answer["ignored"]) == (OF_IMAGES.keys() - with_effect) | {"lora.path", "lora.int_id"}


async def test_a_form_of_an_edit() -> None:
    backend = FakeBackend()
    data = {"prompt": "a cat", "model": "tiny-kontext", "lora": '{"lora_name": "ink"}', "output_format": "jpeg"}
    data |= {"response_format": "file", "generator_device": "cpu", "resolution": "1024", "seed": "7"}
    answer = await post(
        open_image_client(backend), "/v1/images/edits", data=data, files={"image": ("in.png", make_png(64, 64))}
    )
    assert answer.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(answer.content)).format == "JPEG"
    ((_, inputs),) = backend.seen
    assert [(use.file.name, use.scale) for use in inputs.loras] == [("ink", 1.0)]
    assert json.loads(answer.headers["X-Request-Facts"])["ignored"] == ["generator_device", "resolution"]


async def test_an_edit_with_a_reference_to_its_image() -> None:
    backend = FakeBackend()
    address = "data:image/png;base64," + base64.b64encode(make_png(64, 64)).decode()
    body = {"prompt": "a cat", "model": "tiny-kontext", "image_reference": {"image_url": address}}
    await post(open_image_client(backend), "/v1/images/edits", json=body)
    ((_, inputs),) = backend.seen
    assert inputs.image is not None


@pytest.mark.parametrize("form", ["json", "multipart"])
async def test_a_body_of_videos(form: str) -> None:
    backend = FakeBackend()
    texts = {name: json.dumps(value) if isinstance(value, dict) else str(value) for name, value in OF_VIDEOS.items()}
    # With a file httpx sends a multipart form.
    user = {"user": (None, texts.pop("user"))}
    sent: dict[str, Any] = {"json": OF_VIDEOS} if form == "json" else {"data": texts, "files": user}
    answer = await post(open_video_client(backend, None), "/v1/videos/sync", **sent)
    ((spec, inputs),) = backend.seen
    assert (spec.shape.width, spec.shape.height, spec.shape.num_frames, inputs.fps) == (64, 48, 9, 8.0)
    with_effect = {"model", "prompt", "video_params", "negative_prompt", "num_inference_steps", "guidance_scale"}
    with_effect |= {"flow_shift", "seed"}
    assert set(json.loads(answer.headers["X-Request-Facts"])["ignored"]) == OF_VIDEOS.keys() - with_effect


async def test_a_field_goes_before_the_one_of_the_object() -> None:
    backend = FakeBackend()
    body = {
        "prompt": "a cat",
        "video_params": {"num_frames": 9, "fps": None},
        "num_frames": 5,
        "fps": 4,
        "size": "64x64",
    }
    await post(open_video_client(backend, None), "/v1/videos/sync", json=body)
    ((spec, inputs),) = backend.seen
    assert (spec.shape.num_frames, inputs.fps) == (5, 4.0)


async def test_a_request_of_its_benchmark_of_a_trace_of_images() -> None:
    """Its traces have a number of frames and their rate for images too, and it asks for images by chats."""
    backend = FakeBackend()
    fields = {"height": 64, "width": 64, "num_frames": 1, "fps": 16, "num_inference_steps": 4, "seed": 7}
    chat = {"model": "default", "messages": [{"role": "user", "content": "a cat"}], "extra_body": fields}
    answer = (await post(open_client(backend), "/v1/chat/completions", json=chat)).json()
    assert answer["ignored"] == ["fps", "num_frames"]
    answer = (await post(open_client(backend), IMAGES, json={"prompt": "a cat", **fields})).json()
    assert answer["ignored"] == ["fps", "num_frames"]
    assert answer["metrics"] == {name: answer[name] for name in ("stage_durations", "peak_memory_mb")}


async def test_a_mask_under_its_name() -> None:
    backend = FakeBackend()
    image, mask = (base64.b64encode(make_png(64, 64, colour)).decode() for colour in ("black", "white"))
    body = {"prompt": "a cat", "model": "tiny-fill", "image": image, "mask_image": mask, "sys_type": None}
    await post(open_image_client(backend), "/v1/images/edits", json=body)
    ((_, inputs),) = backend.seen
    assert inputs.mask is not None


async def test_files_of_several_images_come_as_one() -> None:
    backend = FakeBackend()
    body = {"prompt": "a cat", "size": "64x48", "n": 2, "response_format": "file", "output_format": "webp"}
    answer = await post(open_client(backend), IMAGES, json=body)
    assert answer.headers["content-type"] == "application/zip"
    assert answer.headers["X-Request-Id"] == backend.seen[0][0].request_id
    with ZipFile(io.BytesIO(answer.content)) as files:
        assert files.namelist() == ["image_0.webp", "image_1.webp"]
        assert [Image.open(files.open(name)).size for name in files.namelist()] == [(64, 48)] * 2


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        (IMAGES, {"lora": {"path": "/loras/ink"}}, "lora", "must have the name of a LoRA of the model"),
        (IMAGES, {"lora": {"name": "ink", "rank": 4}}, "lora", "an object has no field rank"),
        (IMAGES, {"lora": {"name": "nope"}}, "lora", "has no LoRA of this name"),
        (IMAGES, {"image_reference": {"file_id": "x"}}, "image_reference", "POST /v1/images/edits"),
        (IMAGES, {"video_reference": "x"}, "video_reference", "start from a text, or from a text and images"),
        (IMAGES, {"seed": [1, 2]}, "seed", "send a request for each seed"),
        (IMAGES, {"seed": ["x"]}, "seed", "valid integer"),
        (IMAGES, {"num_frames": 9}, "num_frames", "less than or equal to 1"),
        (IMAGES, {"url": "x", "size": "64x64"}, "url", "unknown field"),
        ("/v1/videos/sync", {"stream": True}, "stream", "GET /v1/videos/{id} tells the progress"),
        (IMAGES, {"background": "transparent"}, "background", "no model here makes transparent images"),
        ("/v1/videos/sync", {"video_params": {"length": 3}}, "video_params", "width, height, num_frames, fps"),
        ("/v1/videos/sync", {"video_params": [3]}, "video_params", "must be an object"),
        ("/v1/videos/sync", {"video_url": "x"}, "video_url", "start from a text, or from a text and images"),
    ],
)
async def test_what_cannot_be_granted_is_refused_in_words(
    path: str, fields: dict[str, Any], param: str, says: str
) -> None:
    backend = FakeBackend()
    async with open_video_client(backend, None) as http:
        answer = await http.post(path, json={"prompt": "a cat", **fields})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == param
    assert says in answer.json()["error"]["message"]
    assert not backend.seen


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": [7]},
        {"quality": "lossless"},
        {"service_tier": "scale"},
        {"task": "t2i"},
        {"output_format": "PNG"},
    ],
    ids=str,
)
async def test_values_of_other_clients(fields: dict[str, Any]) -> None:
    backend = FakeBackend()
    answer = (await post(open_client(backend), IMAGES, json={"prompt": "a cat", "size": "64x64", **fields})).json()
    assert answer.get("ignored", []) == (["task"] if "task" in fields else [])
    assert "seed" not in fields or answer["seed"] == 7
    assert answer["quality"] == "exact"
