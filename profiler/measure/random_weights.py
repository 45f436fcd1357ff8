"""Models of full size without their weights: the structure of a model folder, filled with random numbers.

Times and memory are those of the real model, as no kernel looks at the numbers; what comes out means nothing. The
structure is made without memory (torch's meta device), and each tensor straight on the device in the number format that
is served: a stage takes its own size and no more.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import diffusers
import torch

from profiler.measure.configs import read_config_value
from profiler.measure.tokenizers import build_stand_in
from profiler.published_models import Component, read_published_model
from tridentserve.device import find_device
from tridentserve.errors import ProfileError
from tridentserve.models.model_folder import MODEL_INDEX, detect_family
from tridentserve.models.number_formats import NumberFormat
from tridentserve.pipelines import PipelineAdapter, load_adapter
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.pipelines.int8_weights import is_part
from tridentserve.pipelines.weights import attach, named_tensors
from tridentserve.stages import Stage

# The most layers that any pipeline looks at from the last one; their output has the shape that all of them would give.
_FEW_LAYERS = 3
_LAYERS = ("num_hidden_layers", "num_layers")
_DENOISERS = ("transformer", "unet")
_BLOCKS = ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers")
_CONFIG_NAMES = {
    "scheduler": "scheduler_config.json",
    "guider": "guider_config.json",
    "processor": "preprocessor_config.json",
    "image_processor": "preprocessor_config.json",
    "feature_extractor": "preprocessor_config.json",
}


def write_published(name: str, folder: Path, *, few_text_layers: bool = False, most_blocks: int | None = None) -> Path:
    """A model folder of a published model, without weights; returns `folder`, which is made.

    Its tokenizers are stand-ins. `few_text_layers`: with text encoders of the same widths but three layers, for
    conditions of the right shape at little cost. `most_blocks`: cut a transformer to this many blocks of each kind.
    Raises `ProfileError` for a name that is not known, and for a U-Net that is to be cut.
    """
    model = read_published_model(name)
    index: dict[str, Any] = {"_class_name": model.pipeline_class, **model.options}
    for part, component in model.components.items():
        index[part] = [component.library, component.class_name]
        if few_text_layers and component.library == "transformers":
            fewer: dict[str, Any] = {key: _FEW_LAYERS for key in _LAYERS if key in component.config}
            component = component.with_config(**(component.cheap or fewer))
        if most_blocks is not None and part.startswith(_DENOISERS):
            component = component.with_config(**_cut(name, component, most_blocks))
        _write_component(folder / part, component)
        if part.startswith("text_encoder"):
            tokenizer = build_stand_in(component)
            tokenizer.save_pretrained(folder / part.replace("text_encoder", "tokenizer"))
            if "processor" in model.components:
                tokenizer.save_pretrained(folder / "processor")
            index[part.replace("text_encoder", "tokenizer")] = ["transformers", type(tokenizer).__name__]
    (folder / MODEL_INDEX).write_text(json.dumps(index))
    return folder


def _cut(name: str, denoiser: Component, most_blocks: int) -> dict[str, Any]:
    """The entries of a config with fewer blocks."""
    wanted = {key: read_config_value(denoiser.class_name, denoiser.config, key) for key in _BLOCKS}
    found = {key: number for key, number in wanted.items() if isinstance(number, int)}
    if not found:
        raise ProfileError(f"the blocks of {name} all differ, as it is a U-Net; measure all of them")
    return {key: min(number, most_blocks) for key, number in found.items()}


def _write_component(folder: Path, component: Component) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = _CONFIG_NAMES.get(folder.name, "config.json")
    named = {} if component.library == "transformers" else {"_class_name": component.class_name}
    (folder / name).write_text(json.dumps(named | dict(component.config)))


def make_random_adapter(
    folder: Path, stages: frozenset[Stage], device: str = "cpu", formats: Mapping[str, NumberFormat] | None = None
) -> PipelineAdapter:
    """Load an adapter from the configurations alone, with random weights of a variance that activations survive.

    Raises `ModelFolderError` where `load_adapter` does, and `MemoryError` for weights that a CPU has no memory for.
    """
    adapter = load_adapter(folder, stages, device=device, formats=formats, weights=False)
    wanted = named_tensors(adapter)
    target = torch.device(device)
    if find_device(target).is_host:
        _check_host_memory(_count_distinct_bytes(wanted))
    # What is no parameter (tables of positions, frequencies) is computed from the configuration, not random.
    is_all_random = all(_is_random(tensor) or is_part(name) for name, tensor in wanted.items())
    computed = {} if is_all_random else named_tensors(_make_buffers_real(adapter))
    generator = torch.Generator(target).manual_seed(0)

    def make(name: str, like: torch.Tensor) -> torch.Tensor:
        if is_part(name):
            return _make_random_part(name, wanted, target, generator)
        return _make_random(name, like, target, generator) if _is_random(like) else computed[name].to(target)

    made: dict[int, torch.Tensor] = {}
    tensors: Tensors = {}
    for name, tensor in wanted.items():
        if id(tensor) not in made:
            made[id(tensor)] = make(name, tensor)
        tensors[name] = made[id(tensor)]
    attach(adapter, tensors)
    return adapter


def count_weights_bytes(folder: Path, formats: Mapping[str, NumberFormat]) -> dict[Stage, int]:
    """Bytes of the loaded weights of each stage in these number formats, from the configurations alone."""
    return {
        stage: _count_distinct_bytes(
            named_tensors(load_adapter(folder, frozenset({stage}), formats=formats, weights=False))
        )
        for stage in detect_family(folder).components
    }


def _is_diffusers(model: Any) -> bool:
    return isinstance(model, diffusers.ModelMixin)


def _is_random(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _count_distinct_bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors.values()}.values())


def _make_random(name: str, like: torch.Tensor, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Norms that change nothing, matrices that keep the variance of what goes through them."""
    tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    if like.ndim <= 1:
        return tensor.fill_(0.0 if name.endswith("bias") else 1.0)
    return tensor.normal_(std=math.sqrt(like.shape[0] / like.numel()), generator=generator)


def _make_random_part(name: str, wanted: Tensors, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """A part of an int8 weight: evenly spread numbers, with scales by which they keep the variance too."""
    weight, _, part = name.rpartition(".")
    tensor = torch.empty(wanted[name].shape, dtype=wanted[name].dtype, device=device)
    match part:
        case "qdata":
            return tensor.random_(-127, 128, generator=generator)
        case "scale":
            return tensor.fill_(math.sqrt(3 / wanted[f"{weight}.qdata"].shape[1]) / 127)
        case _:
            return tensor.zero_()


def _make_buffers_real(adapter: PipelineAdapter) -> PipelineAdapter:
    """The models of an adapter made once more, only their parameters without memory."""
    models = {}
    for part, model in cast(DiffusersAdapter, adapter).pipe.components.items():
        if isinstance(model, torch.nn.Module):
            with _keep_parameters_on_meta():
                if _is_diffusers(model):
                    twin = type(model).from_config(model.config)  # type: ignore[attr-defined]
                    # Buffers are cast too, as `load_adapter` does, unless some parts stay in float32.
                    models[part] = twin if model._keep_in_fp32_modules else torch.nn.Module.to(twin, model.dtype)  # type: ignore[arg-type]
                else:
                    models[part] = type(model)._from_config(model.config)  # type: ignore[attr-defined]
    twin_adapter = copy.copy(adapter)
    cast(Any, twin_adapter).pipe = SimpleNamespace(components=models)
    return twin_adapter


@contextmanager
def _keep_parameters_on_meta() -> Iterator[None]:
    """Inside, modules put their parameters on the meta device as soon as they have them; buffers stay real."""
    stock = torch.nn.Module.register_parameter

    def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        stock(module, name, None if parameter is None else torch.nn.Parameter(parameter.to("meta")))

    torch.nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = stock  # type: ignore[method-assign]


def _check_host_memory(num_bytes: int) -> None:
    """Linux would rather kill a process than refuse it memory."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines() if Path("/proc/meminfo").exists() else []
    free = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    if free is not None and num_bytes > free:
        raise MemoryError(f"the weights take {num_bytes} bytes and {free} are free here")
