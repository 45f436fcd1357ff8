"""On a GPU every family's stages give the stock pipeline's pixels, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pipelines.models import ALL, PUBLISHED, formats_of, make_inputs, model_folder, stock_pipeline, stock_result
from tridentserve.models.number_formats import NUMBER_FORMATS, NumberFormat
from tridentserve.pipelines import load_adapter
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

pytestmark = pytest.mark.gpu


@contextmanager
def on_device(pipe: Any, device: torch.device) -> Iterator[None]:
    pipe.to(device)
    yield
    pipe.to("cpu")


def generate(
    folder: Path, inputs: GenerationInputs, device: torch.device, formats: Mapping[str, NumberFormat]
) -> tuple[Any, Any]:
    """The last latents and the pixels, each stage of an adapter of its own."""
    encode, diffuse, decode = (
        load_adapter(folder, frozenset({stage}), device=str(device), formats=formats) for stage in Stage
    )
    state = diffuse.prepare(encode.encode(inputs), inputs)
    latents = diffuse.latents(diffuse.step(state, state.num_steps))
    return latents["latents"], decode.decode(latents, inputs)


@pytest.mark.filterwarnings("ignore:.*upcast_vae.*:FutureWarning")
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *((family, dtype) for family in ALL for dtype in ("float32", "bfloat16")),
        *((variant, None) for variant in PUBLISHED),
    ],
)
def test_pixels_are_those_of_the_stock_pipeline(
    gpu: torch.device, tmp_path_factory: pytest.TempPathFactory, variant: str, dtype: str | None
) -> None:
    folder = model_folder(variant, tmp_path_factory.getbasetemp())
    inputs, formats = make_inputs(variant=variant), formats_of(folder, dtype, "cuda")
    with on_device(stock_pipeline(folder, formats), gpu):
        expected = stock_result(folder, inputs, "latent", formats)
        images = np.stack(stock_result(folder, inputs, "pil", formats))
    latents, pixels = generate(folder, inputs, gpu, formats)
    assert torch.equal(latents, expected)
    assert np.array_equal(pixels, images)


@pytest.mark.parametrize("dtype", NUMBER_FORMATS)
def test_a_request_is_the_same_each_time(gpu: torch.device, tmp_path: Path, dtype: str) -> None:
    folder, inputs = model_folder("flux", tmp_path), make_inputs(256, 256, variant="flux")
    formats = formats_of(folder, dtype, "cuda")
    (first, pixels), (second, again) = (generate(folder, inputs, gpu, formats) for _ in range(2))
    assert torch.equal(first, second)
    assert np.array_equal(pixels, again)
