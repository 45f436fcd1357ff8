"""A hub that has a tiny SD3, with the clutter of a real repository around it, and this process as its client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.hub_server import HubServer, read_repository, run_hub_server
from tridentserve.hub import download
from tridentserve.pipelines.tiny.build import ensure_tiny

MODEL_ID = "some-lab/tiny-sd3"
# Files of which a pipeline loads none.
CLUTTER = (
    "README.md",
    "sd3_medium.safetensors",
    "picture.png",
    "transformer/diffusion_pytorch_model.bin",
    "transformer/diffusion_pytorch_model.fp16.safetensors",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/pytorch_model.bin",
    "text_encoder/flax_model.msgpack",
    "text_encoder/model.fp16.safetensors.index.json",
    "vae/onnx/model.onnx",
    "safety_checker/model.safetensors",
)


@pytest.fixture(scope="session")
def repository(tiny_cache: Path) -> dict[str, bytes]:
    return read_repository(ensure_tiny("sd3", tiny_cache)) | dict.fromkeys(CLUTTER, b"clutter")


@pytest.fixture
def hub(repository: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with run_hub_server(HubServer(MODEL_ID, dict(repository))) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(download, "_FIRST_PAUSE_S", 0.01)
        yield server
