"""Model folders as `diffusers` saves them, looked at without torch: which family, how many bytes per stage.

Planning code uses this module, so it reads file headers only. Weights are safetensors, never pickles.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tridentserve.errors import CheckpointError
from tridentserve.families import FAMILIES, Family, family_of_pipeline
from tridentserve.stages import Stage

MODEL_INDEX = "model_index.json"
_INDEX_SUFFIX = ".safetensors.index.json"
# What diffusers and transformers call the weights of a component.
_WEIGHT_NAMES = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
# A header of more than this is no safetensors file (the format's own limit).
_MAX_HEADER_BYTES = 100_000_000
_FLOATING_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder. Raises `CheckpointError` when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; {path.parent} must be a folder saved by diffusers' save_pretrained"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); copy the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; copy the file again")
    return content


def detect_family(folder: Path) -> Family:
    """The family of a model folder, by the `_class_name` of its model_index.json.

    Raises `CheckpointError` when the folder has no model_index.json or its pipeline class is not supported.
    """
    class_name = str(read_json(folder / MODEL_INDEX).get("_class_name"))
    family = family_of_pipeline(class_name)
    if family is None:
        supported = ", ".join(sorted(family.pipeline_class for family in FAMILIES.values()))
        raise CheckpointError(
            f"{folder / MODEL_INDEX} names the pipeline class {class_name!r}, which is not supported; "
            f"use a folder of one of: {supported}"
        )
    return family


def component_classes(folder: Path) -> dict[str, tuple[str, str]]:
    """Library and class name of each component a model folder has. Optional components that are absent
    (`[null, null]` in model_index.json, such as SD3 without its T5) are left out."""
    classes = {}
    for name, value in read_json(folder / MODEL_INDEX).items():
        if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value):
            classes[name] = (value[0], value[1])
    return classes


def weight_files(folder: Path, component: str, library: str) -> tuple[Path, ...]:
    """The safetensors files of a component, in order; empty when it has no weights (tokenizers, schedulers).

    Raises `CheckpointError` when the component's folder, its safetensors or a shard of them is missing.
    """
    base = folder / component
    if not base.is_dir():
        raise CheckpointError(f"{base} is missing although {folder / MODEL_INDEX} lists it; copy the whole folder")
    stem = _WEIGHT_NAMES.get(library)
    # Tokenizers come from transformers too and schedulers from diffusers: only the name tells them from models.
    if stem is None or component.startswith(("tokenizer", "scheduler")):
        return ()
    single, index = base / f"{stem}.safetensors", base / f"{stem}{_INDEX_SUFFIX}"
    if index.is_file():
        shards = sorted({base / str(name) for name in read_json(index).get("weight_map", {}).values()})
        absent = [shard.name for shard in shards if not shard.is_file()]
        if absent or not shards:
            raise CheckpointError(f"{index} lists shards that are missing: {absent or 'all'}; copy them into {base}")
        return tuple(shards)
    if not single.is_file():
        raise CheckpointError(
            f"{single} is missing; only safetensors are loaded: save the model again with safe_serialization=True"
        )
    return (single,)


def safetensors_bytes(path: Path, element_bytes: int | None = None) -> int:
    """Bytes of the tensors in one safetensors file, from its header.

    `element_bytes` counts floating tensors at that many bytes per element (2 for bfloat16) instead of as stored.
    """
    total = 0
    for name, entry in _header(path).items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        if element_bytes is not None and entry["dtype"] in _FLOATING_DTYPES:
            total += math.prod(entry["shape"]) * element_bytes
        else:
            total += end - start
    return total


def stage_weights_bytes(folder: Path, element_bytes: int | None = None) -> dict[Stage, int]:
    """Bytes of the weights of each stage, as stored or at `element_bytes` per floating element.

    Raises `CheckpointError` when the folder is incomplete or a file is not what it should be.
    """
    classes = component_classes(folder)
    return {
        stage: sum(
            safetensors_bytes(path, element_bytes)
            for component in components
            if component in classes
            for path in weight_files(folder, component, classes[component][0])
        )
        for stage, components in detect_family(folder).components.items()
    }


def _header(path: Path) -> Mapping[str, Any]:
    """The JSON header of a safetensors file: 8 bytes of little-endian length, then that much JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{path} is no readable safetensors file ({error}); copy it again") from error
    if path.stat().st_size < 8 + length + end:
        raise CheckpointError(f"{path} is cut short: {path.stat().st_size} of {8 + length + end} bytes; copy it again")
    return dict(header)
