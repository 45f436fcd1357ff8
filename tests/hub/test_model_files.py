"""The files that are fetched of a repository."""

from __future__ import annotations

import pytest

from tests.hub.conftest import CLUTTER
from tridentserve.errors import ModelFolderError
from tridentserve.hub.hub_model import HubModel, is_hub_id
from tridentserve.hub.model_files import choose_files
from tridentserve.models.families import FAMILIES

INDEX = {
    "_class_name": "FluxPipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
SETTINGS = (
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder_2/config.json",
    "text_encoder_2/model.safetensors.index.json",
    "tokenizer/merges.txt",
    "tokenizer/vocab.json",
    "tokenizer_2/spiece.model",
    "tokenizer_2/tokenizer.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    "vae/config.json",
)
WEIGHTS = (
    "text_encoder/model.safetensors",
    "text_encoder_2/model-00001-of-00002.safetensors",
    "text_encoder_2/model-00002-of-00002.safetensors",
    "transformer/diffusion_pytorch_model-00001-of-00003.safetensors",
    "transformer/diffusion_pytorch_model-00002-of-00003.safetensors",
    "transformer/diffusion_pytorch_model-00003-of-00003.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
)


def test_the_files_of_flux() -> None:
    chosen = choose_files([*CLUTTER, *WEIGHTS, *SETTINGS], INDEX, FAMILIES["flux"])
    assert set(chosen.settings) == set(SETTINGS)
    assert set(chosen.weights) == set(WEIGHTS)


def test_an_optional_component_may_be_absent() -> None:
    index = {**INDEX, "text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    assert choose_files([*WEIGHTS, *SETTINGS], index, FAMILIES["sd3"]).weights == WEIGHTS


def test_a_component_without_safetensors_is_named() -> None:
    names = {*WEIGHTS, *SETTINGS, "vae/diffusion_pytorch_model.bin"} - {"vae/diffusion_pytorch_model.safetensors"}
    with pytest.raises(ModelFolderError, match=r"no vae/diffusion_pytorch_model.safetensors, and only safetensors"):
        choose_files(names, INDEX, FAMILIES["flux"])


@pytest.mark.parametrize("text", ["black-forest-labs/FLUX.1-schnell", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "a/b"])
def test_ids_of_the_hub(text: str) -> None:
    assert is_hub_id(text)


@pytest.mark.parametrize("text", ["a", "a/b/c", "./a/b", "/a/b", "~/a", "../a", "a/", "/a", "a b/c", ""])
def test_paths_are_no_ids(text: str) -> None:
    assert not is_hub_id(text)


def test_a_commit_is_pinned() -> None:
    assert HubModel("a/b", "0" * 40).is_pinned
    assert not HubModel("a/b").is_pinned
