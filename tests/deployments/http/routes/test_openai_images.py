"""The openai SDK sends input images, over a real socket to a fake backend."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from PIL import Image

from deployments.config.videos import VideosArgs
from deployments.http.app import create_api
from deployments.videos.jobs import VideoJobs
from tests.deployments.clients import served
from tests.deployments.fake_backend import WITH_IMAGES, FakeBackend, make_png, make_video
from tests.support.waiting import PATIENCE_S
from tridentserve.models.input_image import encode_png, read_image

IMAGE = make_png(64, 48, "red")
NORMALISED = encode_png(read_image(IMAGE, 10**6))
FILE = ("fox.png", IMAGE, "image/png")
EXTRA = {"num_inference_steps": 2}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def sdk(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    jobs = VideoJobs(backend, VideosArgs(), tmp_path)
    await jobs.start()
    async with served(backend, app=create_api(backend, WITH_IMAGES, jobs)) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            yield client
    await jobs.stop()


async def test_an_edit(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    for image in (FILE, [FILE]):
        answer = await sdk.images.edit(
            model="tiny-kontext",
            image=image,
            prompt="blue",
            n=2,
            size="1024x1024",
            extra_body={**EXTRA, "size": "96x64"},
        )
        images = [base64.b64decode(entry.b64_json or "") for entry in answer.data or ()]
        assert [Image.open(io.BytesIO(content)).size for content in images] == [(96, 64)] * 2
    assert [inputs.image for _, inputs in backend.seen] == [NORMALISED] * 2


async def test_an_edit_of_several_images(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    await sdk.images.edit(model="tiny-plus", image=[FILE, FILE], prompt="blue", extra_body=EXTRA)
    assert [inputs.images for _, inputs in backend.seen] == [(NORMALISED, NORMALISED)]


async def test_an_edit_with_a_mask(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    await sdk.images.edit(image=FILE, mask=FILE, prompt="blue", extra_body=EXTRA)
    assert [(spec.model, inputs.mask is not None) for spec, inputs in backend.seen] == [("tiny-fill", True)]


async def test_an_edit_as_a_stream(sdk: openai.AsyncOpenAI) -> None:
    streamed = await sdk.images.edit(image=FILE, prompt="blue", size="auto", stream=True, extra_body=EXTRA)
    kinds = [event.type async for event in streamed]
    assert (kinds[0], kinds[-1]) == ("image_edit.queued", "image_edit.completed")


async def test_what_an_edit_does_not_take(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="has 2 images, this model takes 1 at most"):
        await sdk.images.edit(image=[FILE, FILE], prompt="blue")
    with pytest.raises(openai.UnprocessableEntityError, match="mask: must be left out"):
        await sdk.images.edit(model="tiny-kontext", image=FILE, mask=FILE, prompt="blue")
    with pytest.raises(openai.NotFoundError, match="edits images"):
        await sdk.images.generate(model="tiny-kontext", prompt="blue")


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
async def test_a_video(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    job = await sdk.videos.create_and_poll(
        model="tiny-wan-i2v",
        prompt="it runs",
        input_reference=FILE,
        extra_body={**EXTRA, "size": "64x64", "num_frames": 5},
        poll_interval_ms=20,
    )
    assert (job.status, job.size) == ("completed", "64x64")
    assert (await sdk.videos.download_content(job.id)).content == make_video("it runs")
    assert [inputs.image for _, inputs in backend.seen] == [NORMALISED]
