"""The LoRAs of a model: files in its folder's `loras/`, known by their names. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_FOLDER, _SUFFIX = "loras", ".safetensors"


def lora_names(model_folder: Path) -> tuple[str, ...]:
    """The names that requests may give: the names of the safetensors files, without the ending, sorted."""
    return tuple(sorted(path.stem for path in (model_folder / _FOLDER).glob(f"*{_SUFFIX}") if path.is_file()))


def lora_file(model_folder: Path, name: str) -> Path | None:
    """The file of a LoRA; None where the model has none of this name."""
    return model_folder / _FOLDER / f"{name}{_SUFFIX}" if name in lora_names(model_folder) else None


def lora_bytes(model_folder: Path, names: Iterable[str | None]) -> int:
    """Bytes that LoRAs of these names take on a device, which holds one at a time: the size of the largest file."""
    files = [lora_file(model_folder, name) for name in names if name is not None]
    return max((file.stat().st_size for file in files if file is not None), default=0)
