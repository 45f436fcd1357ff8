"""Models with int8 weights: which layers have them, their bytes, LoRAs, compilation, and random weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import diffusers
import pytest
import torch
import transformers

from profiler.measure.random_weights import count_weights_bytes, make_random_adapter
from tests.pipelines.compiling.test_kernels import traced
from tests.pipelines.loras import random_lora, save_lora, uses
from tests.pipelines.models import ALL, families, formats_of, make_inputs
from tridentserve.models.kernels import Kernels
from tridentserve.models.model_folder import stage_weights_bytes
from tridentserve.pipelines import PipelineAdapter, kernels, load_adapter
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.int8_weights import is_part
from tridentserve.pipelines.weights import attach, detach, named_tensors
from tridentserve.stages import Stage

__all__ = ["traced"]
Model = Callable[[str], Path]
ENCODE, DIFFUSE = frozenset({Stage.ENCODE}), frozenset({Stage.DIFFUSE})


def load(folder: Path, number_format: str, **options: Any) -> PipelineAdapter:
    return load_adapter(folder, DIFFUSE, formats=formats_of(folder, {"D": number_format}), **options)


def denoise(adapter: PipelineAdapter, folder: Path, **changes: Any) -> torch.Tensor:
    inputs = make_inputs(64, 64, 2, variant="flux", **changes)
    condition = load_adapter(folder, ENCODE, formats=formats_of(folder, {"D": "bfloat16"})).encode(inputs)
    return adapter.step(adapter.prepare(condition, inputs), 2).tensors["latents"].float()


def measure_change(given: torch.Tensor, expected: torch.Tensor) -> float:
    return float((given - expected).norm() / expected.norm())


def take_apart(tensor: Any) -> list[torch.Tensor]:
    return [tensor.qdata, tensor.scale] if hasattr(tensor, "qdata") else [tensor]


def test_the_libraries_do_not_see_torchao() -> None:
    """They would import it in every process, with warnings."""
    assert not diffusers.utils.is_torchao_available()
    assert not transformers.utils.is_torchao_available()


def test_linear_layers_have_int8_weights_but_those_that_are_kept_in_float32(model: Model) -> None:
    held = named_tensors(load(model("wan"), "int8"))
    weights = {name: tensor.dtype for name, tensor in held.items() if name.endswith((".weight", ".weight.qdata"))}
    assert weights["transformer.blocks.0.attn1.to_q.weight.qdata"] == torch.int8
    assert weights["transformer.proj_out.weight.qdata"] == torch.int8
    assert weights["transformer.blocks.0.attn1.norm_q.weight"] == torch.bfloat16
    assert weights["transformer.condition_embedder.time_embedder.linear_1.weight"] == torch.float32


@pytest.mark.parametrize(
    ("variant", "component"),
    [
        ("sd3", "text_encoder"),
        ("sd3", "text_encoder_3"),
        *((variant, "text_encoder") for variant in ("hunyuan_dit", "qwen_image", "hunyuan_video", "ltx2", "flux2")),
    ],
)
def test_text_encoders_are_as_transformers_quantizes_them(
    model: Model, variant: str, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its `TorchAoConfig`, as its documentation has it."""
    from torchao.quantization import Int8WeightOnlyConfig

    for module in ("utils.quantization_config", "quantizers.quantizer_torchao"):
        monkeypatch.setattr(f"transformers.{module}.is_torchao_available", lambda: True)
    adapter = load_adapter(model(variant), ENCODE, formats=formats_of(model(variant), {"E": "int8"}))
    given: Any = getattr(cast(DiffusersAdapter, adapter).pipe, component)
    config = transformers.TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    folder = str(model(variant) / component)
    expected = type(given).from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config).state_dict()
    assert given.state_dict().keys() == expected.keys()
    for name, tensor in given.state_dict().items():
        assert type(tensor) is type(expected[name]), name
        assert all(map(torch.equal, take_apart(tensor), take_apart(expected[name]))), name


@pytest.mark.parametrize("variant", families(*ALL))
def test_the_bytes_of_e_are_known_before_it_is_loaded(model: Model, variant: str) -> None:
    """But for tables of positions, which are in no file."""
    folder = model(variant)
    formats = formats_of(folder, {"E": "int8"})
    held = named_tensors(load_adapter(folder, ENCODE, formats=formats))
    held_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in held.values()}.values())
    assert count_weights_bytes(folder, formats)[Stage.ENCODE] == pytest.approx(held_bytes, abs=100)
    assert stage_weights_bytes(folder, formats)[Stage.ENCODE] == pytest.approx(held_bytes, abs=1300)


def test_their_bytes_are_known_before_they_are_loaded(model: Model) -> None:
    folder = model("flux")
    formats = formats_of(folder, {"D": "int8"})
    held_bytes = sum(tensor.nbytes for tensor in named_tensors(load(folder, "int8")).values())
    assert count_weights_bytes(folder, formats)[Stage.DIFFUSE] == held_bytes
    assert stage_weights_bytes(folder, formats)[Stage.DIFFUSE] == held_bytes
    assert count_weights_bytes(folder, formats_of(folder, {"D": "bfloat16"}))[Stage.DIFFUSE] > 1.7 * held_bytes


def test_random_weights_have_the_same_form(model: Model) -> None:
    folder = model("flux")
    adapter = make_random_adapter(folder, DIFFUSE, formats=formats_of(folder, {"D": "int8"}))
    made, loaded = named_tensors(adapter), named_tensors(load(folder, "int8"))
    assert made.keys() == loaded.keys()
    assert any(map(is_part, made))
    assert all((made[name].shape, made[name].dtype) == (each.shape, each.dtype) for name, each in loaded.items())
    latents = denoise(adapter, folder)
    assert torch.isfinite(latents).all()
    assert latents.std() > 0.1


def test_random_weights_of_text_encoders(model: Model) -> None:
    folder = model("flux")
    formats = formats_of(folder, {"E": "int8"})
    adapter = make_random_adapter(folder, ENCODE, formats=formats)
    loaded = named_tensors(load_adapter(folder, ENCODE, formats=formats))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in named_tensors(adapter).items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in loaded.items()
    }
    condition = adapter.encode(make_inputs(64, 64, 2, variant="flux"))
    assert all(torch.isfinite(tensor).all() for tensor in condition.values())


def test_a_lora_changes_them_as_it_changes_others(model: Model, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model("flux"), tmp_path / "flux"))
    save_lora(folder, "style", random_lora(folder))
    adapter = load(folder, "int8")
    plain = denoise(adapter, folder)
    styled = denoise(adapter, folder, loras=uses(folder, "style"))
    expected = denoise(load(folder, "bfloat16"), folder, loras=uses(folder, "style"))
    assert measure_change(styled, expected) < 0.1 < measure_change(plain, expected)
    assert torch.equal(denoise(adapter, folder), plain)


@pytest.mark.slow
def test_a_compiled_model_takes_them_again_after_they_were_away(model: Model, traced: list[object]) -> None:
    folder = model("flux")
    adapter, expected = load(folder, "int8"), denoise(load(folder, "int8"), folder)
    kernels.install(adapter, Kernels(compiled=True))
    assert measure_change(denoise(adapter, folder), expected) < 0.01
    num_traced = len(traced)
    assert num_traced >= 2
    tensors = named_tensors(load(folder, "int8"))
    detach(adapter)
    attach(adapter, tensors)
    assert measure_change(denoise(adapter, folder), expected) < 0.01
    assert len(traced) == num_traced
