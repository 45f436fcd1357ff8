"""LoRAs of a denoising model, one per request: low-rank changes that are added while a batch is denoised.

The layers stay as they are. A hook adds `scale * B(A(input))` to a layer's output with the same operations as PEFT, so
that the result is that of diffusers' `load_lora_weights`. The hooks never write weights, which several processes share,
and they work on the tokens that the layer gets, so LoRAs are exact under sequence parallelism too. diffusers' own
`lora_state_dict` reads the files, in all conventions that it knows (Kohya's, XLabs', PEFT's and others).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import convert_unet_state_dict_to_peft
from torch.nn import functional

from tridentserve.errors import InvalidRequestError, ModelFolderError
from tridentserve.models.lora_files import find_lora, list_loras
from tridentserve.pipelines.lora.scales import Scales, scale_by_alphas, scale_by_config

_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class _LayerChange:
    """The change of one layer."""

    layer: torch.nn.Module
    down: torch.Tensor
    """The matrix A, (rank, inputs), with the sizes of the kernel behind these for a convolution."""
    up: torch.Tensor
    """The matrix B, (outputs, rank), with sizes of 1 behind these for a convolution."""
    scale: float
    """The factor of the change."""

    def make_hook(self) -> Callable[..., torch.Tensor]:
        """Make a forward hook that adds the change to the layer's output."""
        layer = self.layer
        if isinstance(layer, torch.nn.Conv2d):
            geometry: tuple[Any, ...] = (layer.stride, layer.padding, layer.dilation)

            def convolve_change(
                module: torch.nn.Module, args: tuple[torch.Tensor], output: torch.Tensor
            ) -> torch.Tensor:
                low = functional.conv2d(args[0], self.down, None, *geometry)
                return output + functional.conv2d(low, self.up) * self.scale

            return convolve_change

        def add_change(module: torch.nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            return output + functional.linear(functional.linear(args[0], self.down), self.up) * self.scale

        return add_change


class Loras:
    """The LoRAs in a model folder, for the component that denoises. The one used last stays on the device until
    `drop`."""

    def __init__(self, model_folder: Path, pipe: Any, component: str, device: torch.device) -> None:
        self._folder = model_folder
        self._pipe = pipe
        self._component = component
        self._device = device
        self._held: tuple[str, list[_LayerChange]] | None = None

    def check(self, name: str | None) -> None:
        """Raise `InvalidRequestError` unless the model has this LoRA. None stands for no LoRA."""
        if name is not None:
            self._find_file(name)

    @contextmanager
    def applied(self, name: str | None) -> Iterator[None]:
        """Inside the context, the model denoises with this LoRA. Raises `ModelFolderError` when its file does not
        fit."""
        if name is None:
            yield
            return
        handles = [change.layer.register_forward_hook(change.make_hook()) for change in self._get_changes(name)]
        try:
            # Compiled code ignores hooks that are registered later.
            with torch.compiler.set_stance("force_eager"), _freeze(getattr(self._pipe, self._component)):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def drop(self) -> None:
        """Free the memory of the LoRA that was used last."""
        self._held = None

    def _get_changes(self, name: str) -> list[_LayerChange]:
        if self._held is None or self._held[0] != name:
            self._held = None
            self._held = (name, self._load(self._find_file(name)))
        return self._held[1]

    def _find_file(self, name: str) -> Path:
        file = find_lora(self._folder, name)
        if file is None:
            there = ", ".join(list_loras(self._folder)) or "none"
            raise InvalidRequestError(f"lora: this model has no LoRA of this name (there are: {there})", "lora")
        return file

    def _load(self, file: Path) -> list[_LayerChange]:
        tensors, scale_of = self._read(file)
        layers = dict(getattr(self._pipe, self._component).named_modules())
        changes = []
        for key in [key for key in tensors if key.endswith(_A)]:
            path = key.removesuffix(_A)
            down, up = tensors.pop(key), tensors.pop(path + _B, None)
            layer = layers.get(path)
            if up is None or not isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)) or not _fits(layer, down, up):
                raise ModelFolderError(f"{file} is not for this model: it changes {path} otherwise than that could be")
            dtype = layer.weight.dtype
            scale = scale_of(path, up.shape[1])
            # They require gradients as in PEFT's modules, see `_frozen`, and are detached, since views ask their base.
            down, up = (tensor.to(self._device, dtype).detach().requires_grad_() for tensor in (down, up))
            changes.append(_LayerChange(layer, down, up, scale))
        if tensors or not changes:
            kinds = ", ".join(sorted(tensors)[:3]) or "no LoRA at all"
            raise ModelFolderError(
                f"{file} cannot be used as a LoRA of {self._component}: it has {kinds}; LoRAs of text encoders, DoRA "
                "and biases are not supported"
            )
        return changes

    def _read(self, file: Path) -> tuple[dict[str, torch.Tensor], Scales]:
        """Read the file's tensors, named as by PEFT but without the component, and the scale of each layer and rank."""
        try:
            return self._parse(file)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # A file of an unknown format may raise any error.
            raise ModelFolderError(f"{file} cannot be read as a LoRA: {error}") from error

    def _parse(self, file: Path) -> tuple[dict[str, torch.Tensor], Scales]:
        state, *alphas, metadata = self._pipe.lora_state_dict(
            str(file.parent),
            weight_name=file.name,
            local_files_only=True,
            use_safetensors=True,
            return_lora_metadata=True,
            return_alphas=True,
            unet_config=getattr(self._pipe, self._component).config,
        )
        prefix = f"{self._component}."
        own = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
        others = {key: tensor for key, tensor in state.items() if not key.startswith(prefix)}
        if own and not any("lora_A" in key for key in own):
            own = convert_unet_state_dict_to_peft(own)
        if metadata:
            return own | others, scale_by_config(_strip_prefix(prefix, metadata))
        return own | others, scale_by_alphas(_strip_prefix(prefix, alphas[0] if alphas and alphas[0] else {}), _A)


@contextmanager
def _freeze(model: torch.nn.Module) -> Iterator[None]:
    """Inside the context no parameter requires a gradient, as in a model into which PEFT has put a LoRA, whose own
    matrices do. Nothing is trained here, but torch chooses by it whether an input that is not contiguous is multiplied
    as one matrix or sample by sample, and these round differently."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _fits(layer: torch.nn.Linear | torch.nn.Conv2d, down: torch.Tensor, up: torch.Tensor) -> bool:
    weight = layer.weight.shape
    point = (1,) * (len(weight) - 2)
    return 0 not in down.shape and down.shape[1:] == weight[1:] and up.shape == (weight[0], down.shape[0], *point)


def _strip_prefix(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
