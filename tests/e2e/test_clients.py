"""The public clients against the running service: the openai SDK, LiteLLM and LangChain in every run, AIPerf when slow
tests run."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.e2e.conftest import Service
from tests.e2e.test_videos import frames_of
from tests.support.processes import run
from tests.support.waiting import PATIENCE_S
from tridentserve.pipelines.tiny.build import ensure_tiny

# It pins other versions of what we use too (pandas, psutil, ...): it needs an environment of its own, and 1.2 GB.
AIPERF = "aiperf==0.13.0"
# They have many parts (tiktoken, SQLAlchemy) that nothing else here needs: an environment of their own.
FRAMEWORKS = Path(__file__).with_name("frameworks.txt")
# An executable of it that is there already.
AIPERF_ENV = "TRIDENTSERVE_AIPERF"


@pytest.fixture(scope="module")
def sdk(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def test_openai_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["tiny-flux", "tiny-sd3", "tiny-wan"]


def test_openai_images(sdk: openai.OpenAI) -> None:
    answer = sdk.images.generate(
        model="tiny-sd3", prompt="a fox", n=2, size="64x64", extra_body={"num_inference_steps": 3}
    )
    images = [base64.b64decode(entry.b64_json or "") for entry in answer.data or ()]
    assert [Image.open(io.BytesIO(image)).size for image in images] == [(64, 64)] * 2
    streamed = sdk.images.generate(
        model="tiny-sd3", prompt="a fox", stream=True, size="64x64", extra_body={"num_inference_steps": 3}
    )
    assert [event.type for event in streamed][-1] == "image_generation.completed"


def test_openai_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.images.generate(model="dall-e-3", prompt="a fox")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.UnprocessableEntityError, match="multiples of 16"):
        sdk.images.generate(model="tiny-sd3", prompt="a fox", size="65x64")


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_openai_videos(sdk: openai.OpenAI) -> None:
    extra = {"fps": 8, "num_inference_steps": 3}
    asked: dict[str, Any] = {"model": "tiny-wan", "prompt": "a fox", "seconds": "1", "size": "64x64"}
    video = sdk.videos.create_and_poll(**asked, extra_body=extra, poll_interval_ms=100)
    assert (video.status, video.progress, video.seconds, video.size) == ("completed", 100, "1.125", "64x64")
    assert len(frames_of(sdk.videos.download_content(video.id).read())) == 9
    assert video.id in [listed.id for listed in sdk.videos.list(limit=2)]
    assert sdk.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError):
        sdk.videos.retrieve(video.id)


@pytest.fixture(scope="module")
def aiperf(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The executable: that of the environment variable, or of an environment made here."""
    if AIPERF_ENV in os.environ:
        return os.environ[AIPERF_ENV]
    return str(install_apart(tmp_path_factory.mktemp("aiperf"), AIPERF) / "aiperf")


def install_apart(folder: Path, *wanted: str) -> Path:
    """Have pip install what it is told into an environment of its own. Returns the directory of its executables."""
    venv.create(folder)
    # Few of their thousands of modules are ever imported: those are compiled then.
    options = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--no-compile"]
    python = str(folder / "bin" / "python")
    done = run([sys.executable, "-m", "pip", "--python", python, "install", *options, *wanted])
    if done.returncode:
        pytest.skip(f"{wanted} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return folder / "bin"


def profile(aiperf: str, service: Service, cache: Path, out: Path, kind: str, model: str, *more: str) -> dict[str, Any]:
    """AIPerf's report of a few requests. The tokenizer must be a directory: nothing can be fetched."""
    command = [aiperf, "profile", "--url", service.url, "--model", model, "--endpoint-type", kind]
    command += ["--tokenizer", str(ensure_tiny("wan", cache) / "tokenizer"), "--synthetic-input-tokens-mean", "12"]
    command += ["--ui", "none", "--concurrency", "2", "--output-artifact-dir", str(out), *more]
    # Told that it is offline, it takes the directory for the name of one in its cache.
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = run(command, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report: dict[str, Any] = json.loads((out / "profile_export_aiperf.json").read_text())
    return report


@pytest.mark.slow
def test_aiperf_images_and_videos(aiperf: str, service: Service, tiny_cache: Path, tmp_path: Path) -> None:
    steps = ["--extra-inputs", "size:64x64", "--extra-inputs", "num_inference_steps:3", "--request-count", "6"]
    images = profile(aiperf, service, tiny_cache, tmp_path / "a", "image_generation", "tiny-sd3", *steps)
    frames = ["--extra-inputs", "num_frames:5", "--extra-inputs", "fps:8", "--download-video-content"]
    videos = profile(aiperf, service, tiny_cache, tmp_path / "b", "video_generation", "tiny-wan", *steps, *frames)
    for report in (images, videos):
        assert report["request_count"]["avg"] == 6, report
        assert not report["error_summary"]
    assert videos["video_inference_time"]["avg"] > 0
    assert videos["video_peak_memory"]["avg"] > 0


# An image each as its framework asks for it, and the sizes of both.
ASK_BY_FRAMEWORKS = """
import base64, io, sys
from urllib.request import urlopen
import litellm
from langchain_community.utilities.dalle_image_generator import DallEAPIWrapper
from PIL import Image

base = sys.argv[1]
answer = litellm.image_generation(
    model="openai/tiny-sd3", prompt="a fox", size="64x64", n=2, api_base=base, api_key="none", num_inference_steps=3
)
files = [base64.b64decode(entry.b64_json) for entry in answer.data]
# As a chat it reads a text alone.
chat = litellm.completion(
    model="openai/tiny-sd3",
    messages=[{"role": "user", "content": "a fox"}],
    response_format={"type": "text"},
    extra_body={"size": "64x64", "num_inference_steps": 3},
    api_base=base,
    api_key="none",
)
files.append(base64.b64decode(chat.choices[0].message.content.partition("base64,")[2].removesuffix(")")))
wrapper = DallEAPIWrapper(model="tiny-sd3", size="64x64", quality="standard", base_url=base, api_key="none")
files.append(urlopen(wrapper.run("a fox")).read())
print([Image.open(io.BytesIO(file)).size for file in files])
"""


def test_litellm_and_langchain(service: Service, tmp_path: Path) -> None:
    python = install_apart(tmp_path, "--no-deps", "-r", str(FRAMEWORKS)) / "python"
    (site,) = tmp_path.glob("lib/python*/site-packages")
    (site / "behind.pth").write_text(sysconfig.get_path("purelib"))
    # LiteLLM would fetch a list of prices.
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = run([str(python), "-c", ASK_BY_FRAMEWORKS, f"{service.url}/v1"], env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == str([(64, 64)] * 4)
