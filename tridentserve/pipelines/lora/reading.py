"""LoRA files as changes of a model's layers. diffusers' own `lora_state_dict` reads the files, in all conventions that
it knows (Kohya's, XLabs', PEFT's and others). Files come from anywhere and are not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import convert_unet_state_dict_to_peft
from torch.nn import functional

from tridentserve.errors import LoraFileError
from tridentserve.pipelines.lora.scales import Scales, scale_by_alphas, scale_by_config

_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class LayerChange:
    """The change of one layer."""

    layer: torch.nn.Module
    down: torch.Tensor
    """The matrix A, (rank, inputs), with the sizes of the kernel behind these for a convolution."""
    up: torch.Tensor
    """The matrix B, (outputs, rank), with sizes of 1 behind these for a convolution."""
    scale: float
    """The factor of the change that the file has."""

    @property
    def num_bytes(self) -> int:
        """Bytes of both matrices."""
        return self.down.nbytes + self.up.nbytes

    def compute(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute B(A(inputs)) as PEFT does."""
        layer = self.layer
        if isinstance(layer, torch.nn.Conv2d):
            low = functional.conv2d(inputs, self.down, None, layer.stride, layer.padding, layer.dilation)
            return functional.conv2d(low, self.up)
        return functional.linear(functional.linear(inputs, self.down), self.up)


def read_changes(file: Path, pipe: Any, component: str, device: torch.device) -> tuple[LayerChange, ...]:
    """Read the changes of a file for the component of a pipeline that denoises, whose weights may be on torch's meta
    device. Raises `LoraFileError` when the file cannot be read, or does not fit."""
    tensors, scale_of = _read(file, pipe, component)
    layers = dict(getattr(pipe, component).named_modules())
    changes = []
    for key in [key for key in tensors if key.endswith(_A)]:
        path = key.removesuffix(_A)
        down, up = tensors.pop(key), tensors.pop(path + _B, None)
        layer = layers.get(path)
        if up is None or not isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)) or not _fits(layer, down, up):
            raise LoraFileError(f"{file} is not for this model: it changes {path} otherwise than that could be")
        dtype = layer.weight.dtype
        scale = scale_of(path, up.shape[1])
        # They require gradients as in PEFT's modules, see `_freeze`, and are detached, since views ask their base.
        down, up = (tensor.to(device, dtype).detach().requires_grad_() for tensor in (down, up))
        changes.append(LayerChange(layer, down, up, scale))
    if tensors or not changes:
        kinds = ", ".join(sorted(tensors)[:3]) or "no LoRA at all"
        raise LoraFileError(
            f"{file} cannot be used as a LoRA of {component}: it has {kinds}; LoRAs of text encoders, DoRA and biases "
            "are not supported"
        )
    return tuple(changes)


def _read(file: Path, pipe: Any, component: str) -> tuple[dict[str, torch.Tensor], Scales]:
    """Read the file's tensors, named as by PEFT but without the component, and the scale of each layer and rank."""
    if not file.is_file():
        raise LoraFileError(f"{file} is not there: the LoRA cannot be used")
    try:
        return _parse(file, pipe, component)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # A file of an unknown format may raise any error.
        raise LoraFileError(f"{file} cannot be read as a LoRA: {error}") from error


def _parse(file: Path, pipe: Any, component: str) -> tuple[dict[str, torch.Tensor], Scales]:
    state, *alphas, metadata = pipe.lora_state_dict(
        str(file.parent),
        weight_name=file.name,
        local_files_only=True,
        use_safetensors=True,
        return_lora_metadata=True,
        return_alphas=True,
        unet_config=getattr(pipe, component).config,
    )
    prefix = f"{component}."
    own = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    others = {key: tensor for key, tensor in state.items() if not key.startswith(prefix)}
    if own and not any("lora_A" in key for key in own):
        own = convert_unet_state_dict_to_peft(own)
    if metadata:
        return own | others, scale_by_config(_strip_prefix(prefix, metadata))
    return own | others, scale_by_alphas(_strip_prefix(prefix, alphas[0] if alphas and alphas[0] else {}), _A)


def _fits(layer: torch.nn.Linear | torch.nn.Conv2d, down: torch.Tensor, up: torch.Tensor) -> bool:
    weight = layer.weight.shape
    point = (1,) * (len(weight) - 2)
    return 0 not in down.shape and down.shape[1:] == weight[1:] and up.shape == (weight[0], down.shape[0], *point)


def _strip_prefix(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
