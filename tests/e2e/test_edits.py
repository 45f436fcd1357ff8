"""Requests that start from an image, live: the stock pipeline's results, over HTTP, the SDK and the handle."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image

from tests.e2e.conftest import Service, decode_image
from tests.e2e.docs.test_docs_commands import EDITS, run_line
from tests.e2e.test_videos import frames_of
from tests.pipelines.models import STARTING_PIPELINES, make_mask
from tests.support import http
from tests.support.waiting import PATIENCE_S
from tridentserve.models.input_image import encode_png, read_image
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.requests import GenerationInputs, ImageStart, Shape

pytestmark = pytest.mark.slow  # a service of its own: a minute

EDIT: dict[str, Any] = {"prompt": "make it night", "num_inference_steps": 3, "guidance_scale": 2.5, "seed": 11}
VIDEO: dict[str, Any] = {
    "prompt": "it runs",
    "size": "64x64",
    "num_frames": 5,
    "num_inference_steps": 3,
    "seed": 11,
    "fps": 8,
}


def photo() -> bytes:
    """A JPEG of 96x64 pixels that lies on its side, as phones write them."""
    spots = np.random.default_rng(3).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    Image.fromarray(spots).resize((96, 64), Image.Resampling.BILINEAR).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


PHOTO = photo()
UPRIGHT = encode_png(read_image(PHOTO, 10**6))
MASK = make_mask(96, 64)


def name_model(family: str) -> str:
    return f"tiny-{family.replace('_', '-')}"


@pytest.fixture(scope="module")
def edits(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Three workers beside the other service: E, D and C of the edits apart, the videos with the encoder."""
    from ray import serve

    from deployments.app import build_app
    from deployments.config.app import AppArgs

    folder, images = tmp_path_factory.mktemp("edits"), ["tiny-kontext", *map(name_model, STARTING_PIPELINES)]
    args: dict[str, Any] = {
        "models": [
            {"name": "tiny-kontext", "tiny": "flux_kontext", "profile_as": "tiny-flux", "limits": {"max_side": 512}},
            *(
                {
                    "name": name_model(family),
                    "tiny": family,
                    "profile_as": "tiny-sd3",
                    "limits": {"max_side": 512, "max_images": 1},
                }
                for family in STARTING_PIPELINES
            ),
            {
                "name": "tiny-wan-i2v",
                "tiny": "wan_i2v",
                "profile_as": "tiny-wan",
                "limits": {"max_side": 64, "max_frames": 9},
            },
        ],
        "profiles": ["tiny-cpu", "tiny-video-cpu"],
        "videos": {"data_dir": str(folder / "videos")},
        "cluster": {"workers_per_node": 3, "memory_mb": 512, "cpus_per_worker": 0.1},
        "placement": [
            {"tiny-wan-i2v": "EDC", **dict.fromkeys(images, "E")},
            dict.fromkeys(images, "D"),
            dict.fromkeys(images, "C"),
        ],
        "cache_dir": service.args["cache_dir"],
        "decision_log": str(folder / "decisions.jsonl"),
    }
    serve.run(build_app(AppArgs.model_validate(args)), name="edits", route_prefix="/edits")
    yield replace(service, url=f"{service.url}/edits", decision_log=folder / "decisions.jsonl", args=args)
    serve.delete("edits")


@pytest.fixture(scope="module")
def sdk(edits: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{edits.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def stock(edits: Service, family: str, inputs: GenerationInputs) -> Any:
    from tests.pipelines.models import stock_result

    torch.set_num_threads(1)
    return stock_result(ensure_tiny(family, Path(edits.args["cache_dir"])), inputs, "np")


def test_an_edit_is_the_stock_pipelines(edits: Service) -> None:
    fields = {name: str(value) for name, value in EDIT.items()}
    answer = http.post(f"{edits.url}/v1/images/edits", data=fields, files={"image": PHOTO})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["size"] == "64x96"
    assert {run["stage"]: run["workers"] for run in told["timeline"]} == {
        "encode": ["n0w0"],
        "diffuse": ["n0w1"],
        "decode": ["n0w2"],
    }
    inputs = GenerationInputs("make it night", Shape(96, 64), 3, 2.5, 11, image=UPRIGHT)
    expected = stock(edits, "flux_kontext", inputs)
    assert np.array_equal(decode_image(told["data"][0]["b64_json"]), (expected[0] * 255).round().astype("uint8"))
    log = edits.decision_log.read_text()
    assert told["request_id"] in log
    assert "night" not in log
    assert "IHDR" not in log


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("family", STARTING_PIPELINES)
def test_an_image_is_changed_by_a_model_of_text_to_image(edits: Service, family: str, has_mask: bool) -> None:
    """E, D and C run in three processes, and what the first one draws from the image is the stock pipeline's."""
    fields = {name: str(value) for name, value in EDIT.items()} | {"num_inference_steps": "6", "strength": "0.5"}
    files = {"image": PHOTO, **({"mask": MASK} if has_mask else {})}
    answer = http.post(f"{edits.url}/v1/images/edits", data={**fields, "model": name_model(family)}, files=files)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["size"], [run["steps"] for run in told["timeline"]]) == ("64x96", [None, 3, None])
    start, mask = ImageStart(0.5, has_mask, rounds_down=family == "sdxl"), MASK if has_mask else None
    inputs = GenerationInputs("make it night", Shape(96, 64), 6, 2.5, 11, image=UPRIGHT, mask=mask, start=start)
    expected = stock(edits, family, inputs)
    assert np.array_equal(decode_image(told["data"][0]["b64_json"]), (expected[0] * 255).round().astype("uint8"))


def test_the_lines_of_the_documents_run(edits: Service, tmp_path: Path) -> None:
    (tmp_path / "fox.png").write_bytes(UPRIGHT)
    (tmp_path / "sky.png").write_bytes(MASK)
    assert len(EDITS) == 3
    for line in EDITS:
        run_line(line, edits, tmp_path)
        made = tmp_path / line.text.rpartition("> ")[2]
        assert Image.open(io.BytesIO(made.read_bytes())).size == (64, 96)
        made.unlink()


def test_the_sdk_edits_and_says_how_far_it_is(edits: Service, sdk: openai.OpenAI) -> None:
    file = ("fox.jpg", PHOTO, "image/jpeg")
    extra = {"num_inference_steps": 3, "seed": 11}
    at_once = sdk.images.edit(model="tiny-kontext", image=file, prompt="make it night", extra_body=extra)
    streamed = list(sdk.images.edit(image=[file], prompt="make it night", stream=True, extra_body=extra))
    (entry,), last = at_once.data or (None,), streamed[-1]
    assert last.type == "image_edit.completed"
    assert entry is not None
    assert entry.b64_json == last.b64_json


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_a_video_starts_from_the_image(edits: Service, sdk: openai.OpenAI) -> None:
    from ray import serve

    handle: Any = serve.get_app_handle("edits")
    body = {**VIDEO, "model": "tiny-wan-i2v", "input_reference": PHOTO}
    (frames,) = handle.generate.remote({**body, "output_format": "frames"}).result(timeout_s=PATIENCE_S)["frames"]
    inputs = GenerationInputs("it runs", Shape(64, 64, 5), 3, 5.0, 11, image=UPRIGHT)
    expected = stock(edits, "wan_i2v", inputs)
    assert np.array_equal(frames, (expected[0] * 255).round().astype("uint8"))
    extra = {name: VIDEO[name] for name in VIDEO if name != "prompt"}
    job = sdk.videos.create_and_poll(
        prompt="it runs", input_reference=("fox.jpg", PHOTO, "image/jpeg"), extra_body=extra, poll_interval_ms=100
    )
    assert (job.status, job.model) == ("completed", "tiny-wan-i2v")
    shown = frames_of(sdk.videos.download_content(job.id).read())
    assert np.abs(np.stack(shown).astype(int) - frames).mean() < 12  # what H.264 loses


def test_files_that_are_no_images_and_wrong_routes(edits: Service) -> None:
    for content, says in ((PHOTO[:-300], "cannot be read"), (b"GIF89a", "cannot be read"), (b"", "empty")):
        answer = http.post(f"{edits.url}/v1/images/edits", data={"prompt": "x"}, files={"image": content})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "image")
        assert says in answer.text
    answer = http.post(f"{edits.url}/v1/images/generations", json={"prompt": "x", "model": "tiny-kontext"})
    assert (answer.status_code, "/v1/images/edits" in answer.text) == (404, True)
    answer = http.post(f"{edits.url}/v1/videos", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "input_reference")


def test_a_large_image_is_scaled(edits: Service) -> None:
    """Six megapixels of noise, as a body beyond what other routes take, and a result of another size."""
    noise = np.random.default_rng(0).integers(0, 256, (2500, 2600, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG", compress_level=0)
    assert 18 * 2**20 < len(buffer.getvalue()) < 20 * 2**20
    body = {"prompt": "x", "num_inference_steps": 1, "image": base64.b64encode(buffer.getvalue()).decode()}
    answer = http.post(f"{edits.url}/v1/images/edits", json={**body, "size": "64x64"})
    assert (answer.status_code, answer.json().get("size")) == (200, "64x64"), answer.text[:300]
