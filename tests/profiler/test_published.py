"""The published configurations make models of the sizes that their authors state."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers

from profiler.measure_random import random_weights_bytes, write_published
from profiler.published import PUBLISHED, published_model
from profiler.published_parts import Component
from tridentserve.checkpoints import component_classes, detect_family
from tridentserve.errors import ProfileError
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.weights import named_tensors
from tridentserve.stages import Stage

# Billions of parameters. SD3: arXiv 2403.03206, 2 B; FLUX.1: card, 12 B; CogVideoX1.5-5B: card, 5 B; HunyuanVideo:
# arXiv 2412.03603, 13 B; Wan: arXiv 2503.20314, 14 B. T5-XXL: encoder of an 11 B model; Llama 3: 8 B with its head.
# The others: their cards; SD3.5 medium's 2.5 B count its table of positions; HunyuanVideo 1.5: arXiv 2511.18870, 8.3 B.
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
    "hunyuanvideo-1.5": 8.33,
}
ENCODERS = {
    "T5EncoderModel": 4.76,
    "UMT5EncoderModel": 5.68,
    "LlamaModel": 7.5,
    "CLIPTextModel": 0.123,
    "CLIPTextModelWithProjection": None,  # CLIP-L and bigG
    "Mistral3ForConditionalGeneration": 24.0,
    "Qwen2_5_VLTextModel": 7.07,
}


def billions(component: Component) -> float:
    library: Any = {"diffusers": diffusers, "transformers": transformers}[component.library]
    model_class = getattr(library, component.class_name)
    with torch.device("meta"):
        if component.library == "diffusers":
            model = model_class.from_config(dict(component.config))
        else:
            model = model_class._from_config(model_class.config_class(**component.config))
    return float(sum(parameter.numel() for parameter in model.parameters())) / 1e9


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_that_the_authors_state(name: str) -> None:
    components = published_model(name).components
    assert billions(components["transformer"]) == pytest.approx(DENOISERS[name], rel=0.01)
    for part in (part for part in components if part.startswith("text_encoder")):
        expected = 0.219 if components[part].tokenizer == "ByT5" else ENCODERS[components[part].class_name]
        if expected:
            assert billions(components[part]) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_entry_is_one_that_diffusers_knows(name: str) -> None:
    """It ignores others with a warning in its log only."""
    for component in published_model(name).components.values():
        if component.library == "diffusers":
            known = inspect.signature(getattr(diffusers, component.class_name).__init__).parameters
            assert set(component.config) <= set(known)


def test_a_folder_of_a_published_model_loads_as_any_other(tmp_path: Path) -> None:
    folder = write_published("sd3-medium", tmp_path / "full")
    assert detect_family(folder).name == "sd3"
    assert component_classes(folder)["text_encoder_3"] == ("transformers", "T5EncoderModel")
    sizes = random_weights_bytes(folder, torch.bfloat16)
    # 2.03 B parameters; a CLIP-L, a bigG and a T5-XXL; the VAE has an encoder too, as a checkpoint has.
    assert sizes[Stage.DIFFUSE] == pytest.approx(2 * 2.03e9, rel=0.03)
    assert sizes[Stage.ENCODE] == pytest.approx(2 * 5.58e9, rel=0.01)
    assert sizes[Stage.DECODE] == pytest.approx(2 * 83.8e6, rel=0.01)
    few = write_published("sd3-medium", tmp_path / "few", few_text_layers=True)
    encode = load_adapter(few, frozenset({Stage.ENCODE}), weights=False)
    blocks = {name.split(".")[3] for name in named_tensors(encode) if name.startswith("text_encoder_3.encoder.block")}
    assert len(blocks) == 3


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ProfileError, match=r"of 'flux9'; there are: sd3-medium, flux\.1-dev"):
        published_model("flux9")


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_model_loads_by_its_adapter(tmp_path: Path, name: str) -> None:
    """Without memory for its weights, from the files that a checkpoint has."""
    folder, components = write_published(name, tmp_path / "full"), published_model(name).components
    sizes = random_weights_bytes(folder, torch.float32)
    denoisers = sum(billions(part) for key, part in components.items() if key.startswith("transformer"))
    # Tables that are computed are no parameters.
    assert sizes[Stage.DIFFUSE] == pytest.approx(4e9 * denoisers, rel=0.12)
    assert sizes[Stage.ENCODE] == pytest.approx(
        4e9 * sum(billions(part) for key, part in components.items() if key.startswith("text_encoder")), rel=0.01
    )
    assert sizes[Stage.DECODE] > 1e8
