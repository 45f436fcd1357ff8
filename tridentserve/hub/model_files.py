"""The files that a pipeline needs of all that a repository of the hub holds.

Repositories often hold the same weights several times: as one file for other programs, as pickles, in half precision
(`fp16` in the name), for ONNX, OpenVINO and Flax. Of those a pipeline loads none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tridentserve.errors import ModelFolderError
from tridentserve.models.family import Family
from tridentserve.models.model_folder import INDEX_SUFFIX, MODEL_INDEX, find_weights_stem

# Configs, vocabularies and chat templates.
_SETTINGS_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_ANY_INDEX_SUFFIX = ".index.json"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The names of the needed files, as the repository has them."""

    settings: tuple[str, ...]
    """`model_index.json`, and what is small: configs, vocabularies, indexes of shards."""
    weights: tuple[str, ...]
    """Safetensors files."""


def choose_files(names: Collection[str], index: Mapping[str, Any], family: Family) -> ModelFiles:
    """Choose among the files of a repository by its `model_index.json`. Raises `ModelFolderError` where a component has
    no safetensors; other mistakes of the repository show when its settings are read."""
    settings, weights = [MODEL_INDEX], list[str]()
    for component in sorted({name for group in family.components.values() for name in group}):
        entry = index.get(component)
        library = entry[0] if isinstance(entry, list) and entry else None
        if not isinstance(library, str):  # an optional component that this model does not have
            continue
        own_names = [name.rpartition("/")[2] for name in _list_directory(component, names)]
        stem = find_weights_stem(component, library, own_names)
        own_index = f"{component}/{stem}{INDEX_SUFFIX}"
        settings += sorted(
            name
            for name in _list_directory(component, names)
            if name.endswith(_SETTINGS_SUFFIXES) and (name == own_index or not name.endswith(_ANY_INDEX_SUFFIX))
        )
        if stem is not None:
            weights += _choose_weights(component, stem, own_index in names, names)
    return ModelFiles(tuple(settings), tuple(weights))


def _list_directory(component: str, names: Collection[str]) -> Iterator[str]:
    prefix = f"{component}/"
    return (name for name in names if name.startswith(prefix) and "/" not in name[len(prefix) :])


def _choose_weights(component: str, stem: str, is_sharded: bool, names: Collection[str]) -> list[str]:
    """As `list_weight_files` of `tridentserve.models.model_folder` looks for them: the shards where there is an index
    of them, else the one file."""
    ending = r"-\d+-of-\d+" if is_sharded else ""
    pattern = re.compile(re.escape(f"{component}/{stem}") + ending + r"\.safetensors")
    if not (chosen := sorted(name for name in names if pattern.fullmatch(name))):
        raise ModelFolderError(
            f"there is no {component}/{stem}.safetensors, and only safetensors are loaded; choose a repository or a "
            "revision that has them"
        )
    return chosen
