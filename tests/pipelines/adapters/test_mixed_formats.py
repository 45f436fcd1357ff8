"""With a number format for each component the adapters give what the stock pipelines give whose components have these
formats, bit by bit, with E, D and C in three separate adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pipelines.models import (
    ALL,
    PUBLISHED,
    WITH_ONE_IMAGE,
    call_stock,
    choose_stock,
    families,
    formats_of,
    load_stock,
    make_inputs,
    stock_result,
)
from tridentserve.models.families import FAMILIES
from tridentserve.models.model_folder import read_family
from tridentserve.models.number_formats import NumberFormat
from tridentserve.pipelines import load_adapter
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

Model = Callable[[str], Path]
# The families whose stock pipelines take latents of another format to their VAEs, and those that take texts of another
# format to their transformers. The others fail with such components unless the caller casts.
CAST_LATENTS = frozenset(
    {
        *("pixart_sigma", "qwen_image", "wan", "wan_i2v", "hunyuan_video", "hunyuan_video_15", "hunyuan_video_15_i2v"),
        "ltx2",
    }
)
CAST_TEXTS = frozenset({"hunyuan_dit", "wan", "wan_i2v", "hunyuan_video", "hunyuan_video_15", "hunyuan_video_15_i2v"})
CAST_IMAGES = frozenset({"wan_i2v", "hunyuan_video_15_i2v"})


def generate(folder: Path, inputs: GenerationInputs, formats: Mapping[str, NumberFormat]) -> tuple[torch.Tensor, Any]:
    """The last latents and the pixels."""
    encode, diffuse, decode = (load_adapter(folder, frozenset({stage}), formats=formats) for stage in Stage)
    state = diffuse.prepare(encode.encode(inputs), inputs)
    latents = diffuse.latents(diffuse.step(state, state.num_steps))
    return latents["latents"], decode.decode(latents, inputs)


def generate_by_stock(folder: Path, inputs: GenerationInputs, formats: Mapping[str, NumberFormat]) -> tuple[Any, Any]:
    """The same by the stock pipeline. Where it fails with components of different formats, its caller casts between
    them by what the pipeline is open to: its methods and its callback."""
    family = read_family(folder).name
    pipe = choose_stock(load_stock(folder, formats), inputs)
    denoiser = pipe.unet if family == "sdxl" else pipe.transformer
    if family == "ltx2":
        _cast_connected_texts(pipe)
    elif family not in CAST_TEXTS:
        pipe.encode_prompt = _casting_texts(pipe.encode_prompt, denoiser.dtype)
    if FAMILIES[family].takes_image and family not in CAST_IMAGES:
        _cast_images(pipe, denoiser.dtype)
    latents = call_stock(pipe, folder, inputs, "latent")
    if family in CAST_LATENTS:
        return latents, np.stack(call_stock(pipe, folder, inputs, "pil"))

    def cast(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        is_last = step == inputs.num_inference_steps - 1
        return {"latents": tensors["latents"].to(pipe.vae.dtype)} if is_last else tensors

    return latents, np.stack(call_stock(pipe, folder, inputs, "pil", callback_on_step_end=cast))


def _casting_texts(stock: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    def encode_prompt(*arguments: Any, **options: Any) -> Any:
        encoded = stock(*arguments, **options)
        return tuple(
            tensor.to(dtype) if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else tensor
            for tensor in encoded
        )

    return encode_prompt


def _cast_connected_texts(pipe: Any) -> None:
    """Cast texts behind the connectors, which take them as the text encoder makes them. The stock pipeline asks what
    comes before them for the format of the latents that the transformer takes."""
    encode, connect, dtype = pipe.encode_prompt, pipe.connectors.forward, pipe.transformer.dtype
    encoded: list[Any] = []

    def encode_prompt(*arguments: Any, **options: Any) -> Any:
        encoded[:] = encode(*arguments, **options)
        return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in encoded)

    def forward(embeds: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
        embeds, _, negative_embeds, _ = encoded
        connected = connect(torch.cat([negative_embeds, embeds]), mask, **options)
        return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in connected)

    pipe.encode_prompt, pipe.connectors.forward = encode_prompt, forward


def _cast_images(pipe: Any, dtype: torch.dtype) -> None:
    """Take the image to the VAE, and what becomes of it to the transformer."""

    class Pixels(torch.Tensor):
        def to(self, *_: Any, **options: Any) -> torch.Tensor:
            """The stock pipeline asks for the format of the texts, before a mask for float32, which they have."""
            if options == {"dtype": torch.float32}:
                return self
            return self.as_subclass(torch.Tensor).to(pipe.vae.dtype)

    processor = pipe.image_processor if hasattr(pipe, "image_processor") else pipe.video_processor
    preprocess = processor.preprocess
    processor.preprocess = lambda *arguments, **options: preprocess(*arguments, **options).as_subclass(Pixels)
    if hasattr(pipe, "_encode_vae_image"):
        encode_image = pipe._encode_vae_image
        pipe._encode_vae_image = lambda **options: encode_image(**options).to(dtype)


def check(folder: Path, inputs: GenerationInputs, formats: Mapping[str, NumberFormat]) -> None:
    latents, pixels = generate(folder, inputs, formats)
    expected, images = generate_by_stock(folder, inputs, formats)
    assert torch.isfinite(latents).all()
    assert latents.dtype == expected.dtype
    assert torch.equal(latents, expected)
    assert np.array_equal(pixels, images)


@pytest.mark.parametrize("variant", families(*ALL, *WITH_ONE_IMAGE))
def test_a_vae_in_float32_beside_the_others_in_bfloat16(model: Model, variant: str) -> None:
    folder = model(variant)
    formats = formats_of(folder, {"E": "bfloat16", "D": "bfloat16", "C": "float32"})
    check(folder, make_inputs(64, 64, variant=variant), formats)


@pytest.mark.parametrize("variant", families(*ALL))
def test_a_denoising_model_in_float16_beside_encoders_in_bfloat16(model: Model, variant: str) -> None:
    folder = model(variant)
    formats = formats_of(folder, {"E": "bfloat16", "D": "float16", "C": "float32"})
    check(folder, make_inputs(64, 64, variant=variant), formats)


@pytest.mark.filterwarnings("ignore:.*upcast_vae.*:FutureWarning")
@pytest.mark.parametrize("variant", families(*PUBLISHED))
def test_the_published_recipe(model: Model, variant: str) -> None:
    """On a CPU, with the stock pipeline as it is."""
    folder, inputs = model(variant), make_inputs(64, 64, variant=variant)
    formats = formats_of(folder, device="cuda")
    latents, pixels = generate(folder, inputs, formats)
    assert torch.equal(latents, stock_result(folder, inputs, "latent", formats))
    assert np.array_equal(pixels, np.stack(stock_result(folder, inputs, "pil", formats)))


@pytest.mark.parametrize("variant", families(*ALL))
def test_a_condition_is_handed_on_in_the_format_of_the_denoising_model(model: Model, variant: str) -> None:
    """It has the size then that D needs."""
    folder = model(variant)
    formats = formats_of(folder, {"E": "float32", "D": "bfloat16", "C": "float32"})
    condition = load_adapter(folder, frozenset({Stage.ENCODE}), formats=formats).encode(
        make_inputs(64, 64, variant=variant)
    )
    texts = {name: tensor.dtype for name, tensor in condition.items() if "prompt_embeds" in name}
    assert {dtype for dtype in texts.values() if dtype.is_floating_point} == {torch.bfloat16}


@pytest.mark.parametrize("variant", families(*ALL, "wan-2.2", quick=("wan",)))
def test_a_denoising_model_with_int8_weights(model: Model, variant: str) -> None:
    folder = model(variant)
    formats = formats_of(folder, {"E": "bfloat16", "D": "int8", "C": "float32"})
    check(folder, make_inputs(64, 64, 2, variant=variant), formats)


@pytest.mark.parametrize("variant", families(*ALL))
def test_text_encoders_with_int8_weights(model: Model, variant: str) -> None:
    folder = model(variant)
    formats = formats_of(folder, {"E": "int8", "D": "bfloat16", "C": "float32"})
    check(folder, make_inputs(64, 64, 2, variant=variant), formats)


@pytest.mark.parametrize("variant", families("sd3", "wan", "hunyuan_video", "flux2", quick=()))
def test_all_models_but_the_vae_with_int8_weights(model: Model, variant: str) -> None:
    folder = model(variant)
    formats = formats_of(folder, {"E": "int8", "D": "int8", "C": "float32"})
    check(folder, make_inputs(64, 64, 2, variant=variant), formats)


@pytest.mark.parametrize("variant", families(*ALL, quick=()))
def test_int8_weights_change_little(model: Model, variant: str) -> None:
    """After three guided steps, relative to the latents with bfloat16 weights."""
    folder, inputs = model(variant), make_inputs(64, 64, variant=variant)
    asked = {"E": "bfloat16", "D": "bfloat16", "C": "float32"}
    expected, *given = (
        generate(folder, inputs, formats_of(folder, asked | changed))[0].float()
        for changed in ({}, {"D": "int8"}, {"E": "int8"})
    )
    for latents in given:
        assert 0 < (latents - expected).norm() < 0.1 * expected.norm()
