"""LoRAs with random weights for the tests' models, in the forms that files have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.pipelines.models import load_stage
from tridentserve.models.families import FAMILIES
from tridentserve.models.lora_files import LoraFile, LoraUse
from tridentserve.models.model_folder import detect_family
from tridentserve.stages import Stage

RANK = 4
# The size of the changes; weights are about 0.1.
SIZE = 0.1


def denoiser(folder: Path) -> tuple[str, Any]:
    """The component that denoises, with its name."""
    name = FAMILIES[detect_family(folder).name].components[Stage.DIFFUSE][0]
    return name, getattr(load_stage(folder, Stage.DIFFUSE).pipe, name)  # type: ignore[attr-defined]


def random_lora(folder: Path, seed: int = 0, everywhere: bool = False) -> dict[str, torch.Tensor]:
    """`down` and `up` of some linear layers: projections of attention, of feed-forward networks and of modulations; or
    of all of them."""
    generator = torch.Generator().manual_seed(seed)
    _, model = denoiser(folder)
    tensors = {}
    for path, layer in model.named_modules():
        chosen = everywhere or (_is_in_a_block(path) and not path.endswith("v"))
        if isinstance(layer, torch.nn.Linear) and chosen:
            tensors[f"{path}.lora_A.weight"] = SIZE * torch.randn(RANK, layer.in_features, generator=generator)
            tensors[f"{path}.lora_B.weight"] = SIZE * torch.randn(layer.out_features, RANK, generator=generator)
    assert tensors
    return tensors


def _is_in_a_block(path: str) -> bool:
    return "block" in path or path.startswith("layers.")


def save_lora(
    folder: Path, name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> Path:
    """Save a LoRA in the directory `loras` of a model folder. Keys without a component belong to the one that
    denoises."""
    component, _ = denoiser(folder)
    known = (f"{component}.", "text_encoder.", "lora_unet_")
    keyed = {key if key.startswith(known) else f"{component}.{key}": value for key, value in tensors.items()}
    file = path_of(folder, name)
    file.parent.mkdir(exist_ok=True)
    save_file(keyed, file, metadata={"format": "pt"} | (metadata or {}))
    return file


def path_of(folder: Path, name: str) -> Path:
    return folder / "loras" / f"{name}.safetensors"


def uses(folder: Path, *names: str, model: str = "model", **scales: float) -> tuple[LoraUse, ...]:
    """LoRAs of a model folder at scale 1, and then others at the scales that are named."""
    given = [*((name, 1.0) for name in names), *scales.items()]
    return tuple(LoraUse(LoraFile(model, name, path_of(folder, name)), scale) for name, scale in given)
