"""The layers of a model: the members of its lists of modules, found by the names of tensors, without torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tridentserve.models.model_folder import detect_family, list_weight_files, measure_tensors, read_component_classes
from tridentserve.models.number_formats import NumberFormat
from tridentserve.stages import Stage
from tridentserve.weights_share import LayerSizes

_LAYER = re.compile(r"(.+?\.\d+)\.")


def name_layer(tensor: str) -> str | None:
    """The path of the layer that a tensor belongs to, such as `transformer.transformer_blocks.3`; None outside all
    layers. Lists inside a layer make no layers of their own."""
    found = _LAYER.match(tensor)
    return found[1] if found else None


def read_layer_sizes(
    folder: Path, formats: Mapping[str, NumberFormat] | None = None, image_start: bool = False
) -> dict[Stage, LayerSizes]:
    """The weights of each stage of a model folder by layers, each component in its number format; without `formats` in
    that in which it is stored. `image_start` is as in `detect_family`.

    Raises `ModelFolderError` when the folder is incomplete or a file is damaged.
    """
    classes = read_component_classes(folder)
    return {
        stage: _sum_layers(
            {
                f"{component}.{name}": num_bytes
                for component in components
                if component in classes
                for path in list_weight_files(folder, component, classes[component][0])
                for name, num_bytes in measure_tensors(path, (formats or {}).get(component)).items()
            }
        )
        for stage, components in detect_family(folder, image_start).components.items()
    }


def _sum_layers(tensors: dict[str, int]) -> LayerSizes:
    sums: defaultdict[str | None, int] = defaultdict(int)
    for name, num_bytes in tensors.items():
        sums[name_layer(name)] += num_bytes
    rest_bytes = sums.pop(None, 0)
    return LayerSizes(rest_bytes, tuple(sums.values()))
