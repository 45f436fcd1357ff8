"""The published configurations make models of the sizes that their authors state."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from PIL import Image

from profiler.measure.random_weights import count_weights_bytes, write_published
from profiler.measure.tokenizers import build_stand_in
from profiler.published_models import Component, list_published_models, read_published_model, read_shared_components
from tests.pipelines.models import formats_of
from tridentserve.errors import ProfileError
from tridentserve.models.model_folder import detect_family, read_component_classes
from tridentserve.models.number_formats import NumberFormats, find_formats
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.weights import named_tensors
from tridentserve.stages import Stage

# Billions of parameters. SD3: arXiv 2403.03206, 2 B; FLUX.1: card, 12 B; CogVideoX1.5-5B: card, 5 B; HunyuanVideo:
# arXiv 2412.03603, 13 B; Wan: arXiv 2503.20314, 14 B. T5-XXL: encoder of an 11 B model; Llama 3: 8 B with its head.
# SDXL: arXiv 2307.01952, 2.6 B; PixArt-Sigma: arXiv 2403.04692, 0.6 B; HunyuanDiT: its README, 1.5 B; Qwen-Image: arXiv
# 2508.02324, 20 B; Mochi: its README, 10 B. The others: their cards; SD3.5 medium's 2.5 B count its table of positions;
# HunyuanVideo 1.5: arXiv 2511.18870, 8.3 B; Z-Image: arXiv 2511.22699, 6.15 B; LTX-2: arXiv 2601.03233, 19 B.
DENOISERS = {
    "sd3-medium": 2.03,
    "flux.1-dev": 11.9,
    "cogvideox1.5-5b": 5.57,
    "hunyuanvideo": 12.8,
    "wan2.1-14b": 14.3,
    "sd3.5-medium": 2.24,
    "sd3.5-large": 8.06,
    "flux.1-schnell": 11.9,
    "cogvideox-2b": 1.69,
    "cogvideox-5b": 5.57,
    "wan2.1-1.3b": 1.42,
    "wan2.2-t2v-a14b": 14.3,
    "wan2.2-ti2v-5b": 5.0,
    "flux.2-dev": 32.2,
    "flux.2-klein-4b": 3.88,
    "flux.2-klein-9b": 9.08,
    "hunyuanvideo-1.5": 8.33,
    "sdxl-base-1.0": 2.57,
    "pixart-sigma-1024": 0.611,
    "hunyuandit-1.2": 1.5,
    "qwen-image": 20.4,
    "qwen-image-edit": 20.4,
    "qwen-image-edit-2509": 20.4,
    "qwen-image-edit-2511": 20.4,
    "z-image": 6.15,
    "z-image-turbo": 6.15,
    "mochi-1": 10.0,
    "flux.1-kontext-dev": 11.9,
    "flux.1-fill-dev": 11.9,
    "cogvideox-5b-i2v": 5.57,
    "cogvideox1.5-5b-i2v": 5.57,
    "wan2.1-i2v-14b-480p": 16.4,
    "wan2.2-i2v-a14b": 14.3,
    "hunyuanvideo-1.5-i2v": 8.33,
    "ltx-2": 18.9,
}
_MODELS_OF_ENCODE = ("encoder", "encoder_2", "encoder_3", "vae", "connectors")
# By class and width. HunyuanDiT's README: mT5 1.6 B, CLIP 350 M. Qwen, Gemma: their cards.
ENCODERS = {
    ("T5EncoderModel", 4096): 4.76,
    ("T5EncoderModel", 2048): 1.67,
    ("T5EncoderModel", 1472): 0.219,
    ("UMT5EncoderModel", 4096): 5.68,
    ("BertModel", 1024): 0.352,
    ("LlamaModel", 4096): 7.5,
    ("CLIPTextModel", 768): 0.123,
    ("CLIPTextModelWithProjection", 768): 0.1237,
    ("CLIPTextModelWithProjection", 1280): 0.695,
    ("CLIPVisionModel", 1280): 0.632,
    ("SiglipVisionModel", 1152): 0.428,
    ("Mistral3ForConditionalGeneration", None): 24.0,
    ("Gemma3ForConditionalGeneration", None): 12.2,
    ("Qwen2_5_VLTextModel", 3584): 7.07,
    ("Qwen2_5_VLForConditionalGeneration", None): 8.29,
    ("Qwen3ForCausalLM", 2560): 4.02,
    ("Qwen3Model", 2560): 4.02,
    ("Qwen3ForCausalLM", 4096): 8.19,
}


def billions(component: Component) -> float:
    libraries = {"diffusers": diffusers, "transformers": transformers, "ltx2": diffusers.pipelines.ltx2}
    model_class: Any = getattr(libraries[component.library], component.class_name)
    with torch.device("meta"):
        if component.library == "transformers":
            model = model_class._from_config(model_class.config_class(**component.config))
        else:
            model = model_class.from_config(dict(component.config))
    return float(sum(parameter.numel() for parameter in model.parameters())) / 1e9


@pytest.mark.parametrize("name", list_published_models())
def test_sizes_are_those_that_the_authors_state(name: str) -> None:
    components = read_published_model(name).components
    denoiser = components.get("transformer") or components["unet"]
    assert billions(denoiser) == pytest.approx(DENOISERS[name], rel=0.01)
    for encoder in (component for part, component in components.items() if "encoder" in part):
        width = encoder.config.get("hidden_size", encoder.config.get("d_model"))
        assert billions(encoder) == pytest.approx(ENCODERS[encoder.class_name, width], rel=0.01)


@pytest.mark.parametrize("name", ["sd3.5-medium", "wan2.2-t2v-a14b", "wan2.2-ti2v-5b"])
def test_the_weights_in_the_documentation_are_those_of_the_configuration(name: str, tmp_path: Path) -> None:
    """In the number formats of a GPU, both transformers of A14B together."""
    folder = write_published(name, tmp_path / name)
    formats = find_formats(detect_family(folder), NumberFormats(), "cuda")
    encode, diffuse, decode = (count_weights_bytes(folder, formats)[stage] / 1e9 for stage in Stage)
    page = (Path(__file__).parents[2] / "docs" / "real-models.md").read_text(encoding="utf-8")
    assert f"{encode:.1f}, {diffuse:.1f} and {decode:.1f} GB" in page


def test_the_vae_of_sdxl_has_its_size() -> None:
    """HunyuanDiT's README: 83 M, with the encoder."""
    assert billions(read_shared_components()["sdxl-vae"]) == pytest.approx(0.0837, rel=0.01)


@pytest.mark.parametrize("name", list_published_models())
def test_every_entry_is_one_that_diffusers_knows(name: str) -> None:
    """It ignores others with a warning in its log only."""
    for component in read_published_model(name).components.values():
        if component.library == "diffusers":
            known = inspect.signature(getattr(diffusers, component.class_name).__init__).parameters
            assert set(component.config) <= set(known)


def test_a_model_folder_of_a_published_model_loads_as_any_other(tmp_path: Path) -> None:
    folder = write_published("sd3-medium", tmp_path / "full")
    assert detect_family(folder).name == "sd3"
    assert read_component_classes(folder)["text_encoder_3"] == ("transformers", "T5EncoderModel")
    sizes = count_weights_bytes(folder, formats_of(folder, "bfloat16"))
    # 2.03 B parameters; a CLIP-L, a bigG and a T5-XXL; the VAE has an encoder too, as a model folder has.
    assert sizes[Stage.DIFFUSE] == pytest.approx(2 * 2.03e9, rel=0.03)
    assert sizes[Stage.ENCODE] == pytest.approx(2 * 5.58e9, rel=0.01)
    assert sizes[Stage.DECODE] == pytest.approx(2 * 83.8e6, rel=0.01)
    few = write_published("sd3-medium", tmp_path / "few", few_text_layers=True)
    encode = load_adapter(few, frozenset({Stage.ENCODE}), weights=False)
    blocks = {name.split(".")[3] for name in named_tensors(encode) if name.startswith("text_encoder_3.encoder.block")}
    assert len(blocks) == 3


def test_a_transformer_can_be_cut_to_few_blocks(tmp_path: Path) -> None:
    """Numbers that a config names and those that are a class's default; of a U-Net no two blocks are alike."""
    for name, blocks in (("flux.1-dev", {"num_layers": 1, "num_single_layers": 1}), ("qwen-image", {"num_layers": 1})):
        folder, whole = write_published(name, tmp_path / name, most_blocks=1), read_published_model(name)
        config = json.loads((folder / "transformer" / "config.json").read_text())
        transformer = whole.components["transformer"]
        assert config == {"_class_name": transformer.class_name, **transformer.config, **blocks}
    with pytest.raises(ProfileError, match=r"the blocks of sdxl-base-1\.0 all differ"):
        write_published("sdxl-base-1.0", tmp_path / "sdxl", most_blocks=1)


def test_prompts_have_as_many_tokens_as_the_real_tokenizer_makes() -> None:
    """Qwen-Image's pipeline cuts off as many tokens as Qwen's own tokenizer makes of the text before the prompt."""
    tokenizer = build_stand_in(read_published_model("qwen-image").components["text_encoder"])
    pipe = diffusers.QwenImagePipeline(None, None, None, tokenizer, None)
    (before, _, after), start = pipe.prompt_template_encode.partition("{}"), pipe.prompt_template_encode_start_idx
    assert len(tokenizer(before)["input_ids"]) == start
    assert len(tokenizer(f"{before}a boat, at dawn{after}")["input_ids"]) == start + 5 + 5


def test_an_image_has_as_many_tokens_as_the_encoder_expects(tmp_path: Path) -> None:
    """Of 28 x 28 pixels each, with the number that the encoder's config names."""
    folder = write_published("qwen-image-edit", tmp_path / "edit", few_text_layers=True)
    adapter = load_adapter(folder, frozenset({Stage.ENCODE}), weights=False)
    processor = adapter.pipe.processor  # type: ignore[attr-defined]
    text = "<|vision_start|><|image_pad|><|vision_end|>a boat"
    found = processor(text=[text], images=[Image.new("RGB", (1024, 1024))], return_tensors="pt")
    image_token_id = json.loads((folder / "text_encoder" / "config.json").read_text())["image_token_id"]
    assert (found["input_ids"] == image_token_id).sum() == 37 * 37
    assert found["input_ids"].shape == (1, 37 * 37 + 4)


def test_a_prompt_of_a_chat_has_the_tokens_of_its_template() -> None:
    """Z-Image's prompt is not padded: as by Qwen's own tokenizer, eight tokens of the chat are around it."""
    tokenizer = build_stand_in(read_published_model("z-image-turbo").components["text_encoder"])
    messages = [{"role": "user", "content": "a boat, at dawn"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert len(tokenizer(text)["input_ids"]) == 8 + 5


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ProfileError, match=r"of 'flux9'; there are: cogvideox-2b, cogvideox-5b"):
        read_published_model("flux9")


@pytest.mark.slow
@pytest.mark.parametrize("name", list_published_models())
def test_every_published_model_loads_by_its_adapter(tmp_path: Path, name: str) -> None:
    """Without memory for its weights, from the files that a model folder has."""
    folder, components = write_published(name, tmp_path / "full"), read_published_model(name).components
    sizes = count_weights_bytes(folder, formats_of(folder, "float32"))
    denoisers = sum(billions(part) for key, part in components.items() if key.startswith(("transformer", "unet")))
    # Tables that are computed are no parameters.
    assert sizes[Stage.DIFFUSE] == pytest.approx(4e9 * denoisers, rel=0.12)
    of_encode = detect_family(folder).components[Stage.ENCODE]
    encoders = (part for key, part in components.items() if key in of_encode and key.endswith(_MODELS_OF_ENCODE))
    assert sizes[Stage.ENCODE] == pytest.approx(4e9 * sum(map(billions, encoders)), rel=0.01)
    assert sizes[Stage.DECODE] > 1e8
