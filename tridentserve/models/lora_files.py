"""The LoRAs of a model: files in the directory `loras` of its model folder. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_DIRECTORY, _SUFFIX = "loras", ".safetensors"


def list_loras(model_folder: Path) -> tuple[str, ...]:
    """The names that requests may give: those of the safetensors files without their ending, sorted."""
    return tuple(sorted(path.stem for path in (model_folder / _DIRECTORY).glob(f"*{_SUFFIX}") if path.is_file()))


def find_lora(model_folder: Path, name: str) -> Path | None:
    """The file of a LoRA, or None where the model has no LoRA of this name."""
    return model_folder / _DIRECTORY / f"{name}{_SUFFIX}" if name in list_loras(model_folder) else None


def lora_bytes(model_folder: Path, names: Iterable[str | None]) -> int:
    """Bytes that LoRAs of these names need on a device. It holds one at a time, so this is the size of the largest
    file."""
    files = [find_lora(model_folder, name) for name in names if name is not None]
    return max((file.stat().st_size for file in files if file is not None), default=0)
