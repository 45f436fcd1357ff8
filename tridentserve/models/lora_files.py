"""The LoRAs of a model: files in the directory `loras` of its model folder, and files that are added while a service
runs. This module does not import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DIRECTORY, SUFFIX = "loras", ".safetensors"
# Digits of a digest that tell two files apart in logs.
_KEY_DIGITS = 12


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA of a model. A request has it from the moment in which it is accepted, whatever becomes of the name."""

    model: str
    """The name of the model."""
    name: str
    """The name by which requests ask for it."""
    path: Path
    """The file, at the same path on all nodes."""
    digest: str = ""
    """SHA-256 of a file that was added while the service ran: no other content is taken for it. Empty for a file of the
    model folder, which may be replaced like the folder's weights."""

    @property
    def key(self) -> str:
        """The name under which workers tell the scheduler that they hold it."""
        return f"{self.model}:{self.name}" + (f"@{self.digest[:_KEY_DIGITS]}" if self.digest else "")


@dataclass(frozen=True, slots=True)
class LoraUse:
    """A LoRA of a request."""

    file: LoraFile
    scale: float = 1.0
    """The changes are multiplied by this, in addition to the scale that the file has."""

    def to_plain(self) -> dict[str, Any]:
        """The form in which states of requests have it. `from_plain` is the inverse."""
        file = self.file
        names = {"model": file.model, "name": file.name, "path": str(file.path), "digest": file.digest}
        return {**names, "scale": self.scale}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> LoraUse:
        file = LoraFile(plain["model"], plain["name"], Path(plain["path"]), plain["digest"])
        return cls(file, plain["scale"])


def list_loras(model: str, model_folder: Path) -> tuple[LoraFile, ...]:
    """The LoRAs in a model folder, by name: those of the safetensors files, without their ending."""
    files = sorted(path for path in (model_folder / _DIRECTORY).glob(f"*{SUFFIX}") if path.is_file())
    return tuple(LoraFile(model, path.stem, path) for path in files)


def count_file_bytes(file: LoraFile) -> int:
    """The size of a file, which is about what its LoRA takes on a device; 0 for a file that is gone."""
    try:
        return file.path.stat().st_size
    except OSError:
        return 0


def compute_digest(path: Path) -> str:
    """The digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def collect_files(uses: Iterable[Iterable[LoraUse]]) -> tuple[LoraFile, ...]:
    """The files of the LoRAs of several requests, each once."""
    return tuple(dict.fromkeys(use.file for each in uses for use in each))
