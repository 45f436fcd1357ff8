"""Model folders as `diffusers` saves them, read without torch: the family, and the bytes of each stage's weights.

Planning code uses this module, so it reads only the headers of files. Weights are safetensors, never pickles.
"""

from __future__ import annotations

import json
import math
import operator
import struct
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tridentserve.errors import ConfigError, ModelFolderError
from tridentserve.models.families import find_family
from tridentserve.models.family import Family
from tridentserve.models.number_formats import ELEMENT_BYTES, VAE, NumberFormat, find_computing_format, has_weights
from tridentserve.models.whole.whole_family import describe_whole_family, with_trained_size
from tridentserve.stages import Stage

MODEL_INDEX = "model_index.json"
# The models that lie in this package with their weights, so that a service draws without any download.
_SHIPPED = Path(__file__).parent / "shipped"
INDEX_SUFFIX = ".safetensors.index.json"
# The file name without its ending that each library gives to the weights of a component. Classes of diffusers that
# belong to one pipeline have the name of its module for a library.
_WEIGHT_NAMES = {
    "diffusers": "diffusion_pytorch_model",
    "transformers": "model",
    "ltx2": "diffusion_pytorch_model",
}
# Schedulers of diffusers that do not run the model exactly once for each inference step, which plans, progress and
# profiles count on.
_NOT_STEP_BY_STEP = frozenset(
    {
        "DDPMWuerstchenScheduler",
        "FlowMatchHeunDiscreteScheduler",
        "HeunDiscreteScheduler",
        "KDPM2AncestralDiscreteScheduler",
        "KDPM2DiscreteScheduler",
        "MiniMaxH3Scheduler",
        "PNDMScheduler",
        "RePaintScheduler",
        "SCMScheduler",
    }
)
# The safetensors format's own limit for a header.
_MAX_HEADER_BYTES = 100_000_000
# The names of the denoising models whose configs say which size a model served whole was trained for.
_DENOISERS = ("unet", "transformer")
# What a linear layer with int8 weights has for each of its outputs: a scale in float32, and its zero in int8.
_SCALE_BYTES = ELEMENT_BYTES["float32"] + ELEMENT_BYTES["int8"]
# The names, without their paths, of matrices that stay as they are beside int8 weights: the embeddings of text
# encoders, and the layers that transformers does not quantize.
_PLAIN_MATRICES = frozenset(
    {
        *("shared", "embed_tokens", "relative_attention_bias", "token_embedding", "position_embedding"),
        *("word_embeddings", "position_embeddings", "token_type_embeddings", "text_projection", "lm_head"),
    }
)
_FLOATING_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file of a model folder. Raises `ModelFolderError` when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ModelFolderError(
                f"{path} is missing, and so is its folder; name a folder saved by diffusers' save_pretrained, or a "
                "model of the hub as owner/name"
            ) from None
        raise ModelFolderError(
            f"{path} is missing; {path.parent} must be a folder saved by diffusers' save_pretrained"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} cannot be read as JSON ({error}); copy the file again") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} holds no JSON object; copy the file again")
    return content


def detect_family(folder: Path, image_start: bool = False) -> Family:
    """Find the family of a model folder by the `_class_name` in its model_index.json, with the model's own
    `size_multiple`. `image_start`: its requests may start from an image, as the family allows it.

    Raises `ModelFolderError` when the folder has no model_index.json, when its pipeline class is not supported, or when
    a config that determines the multiple is missing or makes no sense.
    """
    family = read_family(folder, image_start)
    if family.whole:
        configs = (folder / denoiser / "config.json" for denoiser in _DENOISERS)
        found = next((path for path in configs if path.is_file()), None)
        return family if found is None else with_trained_size(family, read_json(found))
    if not family.size_factors:
        return family
    return replace(
        family, size_multiple=math.prod(_read_size_factor(folder, *factor) for factor in family.size_factors)
    )


def read_family(folder: Path, image_start: bool = False) -> Family:
    """The family by model_index.json alone, with the `size_multiple` that most of its models have. `image_start` is as
    in `detect_family`. Raises `ModelFolderError`."""
    index = read_json(folder / MODEL_INDEX)
    class_name = str(index.get("_class_name"))
    family = find_family(class_name) or describe_whole_family(class_name, index, folder / MODEL_INDEX)
    return family.with_image_start() if image_start else family


def _read_size_factor(folder: Path, component: str, key: str, default: int) -> int:
    path = folder / component / "config.json"
    value = read_json(path).get(key, default)
    factor = value[-1] if isinstance(value, list) and value else value
    if not isinstance(factor, int) or factor < 1:
        raise ModelFolderError(f"{path} says {key} is {value!r}, which is no number of pixels; copy the file again")
    return factor


def read_component_classes(folder: Path) -> dict[str, tuple[str, str]]:
    """The library and class name of each component that a model folder has. Optional components that are absent
    (`[null, null]` in model_index.json, such as the T5 of some SD3 models) are left out.

    Raises `ModelFolderError` when another component is absent, when an entry is not a pair of a known library and a
    class, or when the scheduler is not supported.
    """
    index, family = read_json(folder / MODEL_INDEX), detect_family(folder)
    classes = {}
    for name in (component for components in family.components.values() for component in components):
        value = index.get(name)
        if name in family.optional and value in (None, [None, None]):
            continue
        pair = value if isinstance(value, list) and len(value) == 2 else [None, None]
        library, class_name = pair
        if not (isinstance(library, str) and library and isinstance(class_name, str) and class_name):
            raise ModelFolderError(
                f"{folder / MODEL_INDEX} names no library and class for {name!r} (there: {json.dumps(value)[:80]}), "
                f"which a {family.pipeline_class} needs; save the whole pipeline again"
            )
        # A pipeline that is served whole may have components whose classes are in its own package of diffusers.
        if library not in _WEIGHT_NAMES and not (family.whole and library.isidentifier()):
            raise ModelFolderError(
                f"{folder / MODEL_INDEX} wants {library}.{class_name} for {name!r}; use a folder whose components are "
                "classes of diffusers or transformers"
            )
        classes[name] = (library, class_name)
    if not family.whole:
        _check_denoising(folder, index, family, classes)
    known = {name for names in family.components.values() for name in names}
    for name in classes:
        reader = name.replace("text_encoder", "tokenizer").replace("image_encoder", "image_processor")
        if reader in known and reader not in classes:
            raise ModelFolderError(
                f"{folder / MODEL_INDEX} names {name!r} without {reader!r}; leave out both or neither"
            )
    return classes


def _check_denoising(
    folder: Path, index: Mapping[str, Any], family: Family, classes: Mapping[str, tuple[str, str]]
) -> None:
    """Raise `ModelFolderError` for models that give wrong outputs, or that fail no earlier than at the first step."""
    scheduler = classes["scheduler"][1]
    if scheduler in _NOT_STEP_BY_STEP:
        raise ModelFolderError(
            f"{folder / MODEL_INDEX} names the scheduler {scheduler}, which does not run the model once for each "
            "inference step, and is not supported; save the pipeline with one that does, such as "
            "EulerDiscreteScheduler, DPMSolverMultistepScheduler or (flow matching) FlowMatchEulerDiscreteScheduler"
        )
    has_boundary = "boundary_ratio" in family.options and index.get("boundary_ratio") is not None
    if has_boundary and "transformer_2" not in classes:
        raise ModelFolderError(
            f"{folder / MODEL_INDEX} has a boundary_ratio, but no 'transformer_2' for the steps below it; copy the "
            "whole model again, or set boundary_ratio to null for one of a single transformer"
        )


def find_weights_stem(component: str, library: str, names: Collection[str]) -> str | None:
    """The name without endings of the safetensors files of a component, whose directory has files of these `names`.
    None for one without weights, which only its name tells from a model, since both libraries have both."""
    if not has_weights(component):
        return None
    there = (stem for stem in _WEIGHT_NAMES.values() if {f"{stem}.safetensors", f"{stem}{INDEX_SUFFIX}"} & set(names))
    return _WEIGHT_NAMES.get(library) or next(there, _WEIGHT_NAMES["transformers"])


def list_weight_files(folder: Path, component: str, library: str) -> tuple[Path, ...]:
    """The safetensors files of a component, in order. Components without weights (tokenizers, schedulers) have none.

    Raises `ModelFolderError` when the component's directory, its safetensors file or one of the shards is missing.
    """
    base = folder / component
    if not base.is_dir():
        raise ModelFolderError(f"{base} is missing although {folder / MODEL_INDEX} lists it; copy the whole folder")
    stem = find_weights_stem(component, library, [path.name for path in base.iterdir()])
    if stem is None:
        return ()
    single, index = base / f"{stem}.safetensors", base / f"{stem}{INDEX_SUFFIX}"
    if index.is_file():
        return _list_shards(index)
    if not single.is_file():
        raise ModelFolderError(
            f"{single} is missing; only safetensors are loaded: save the model again with safe_serialization=True"
        )
    return (single,)


def _list_shards(index: Path) -> tuple[Path, ...]:
    """The files that an index of shards lists. Raises `ModelFolderError` unless all of them exist."""
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and name and Path(name).name == name for name in names):
        raise ModelFolderError(
            f"{index} holds no weight_map from tensors to the files in its directory; copy the file again"
        )
    shards = [index.parent / name for name in sorted(set(names))]
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise ModelFolderError(f"{index} lists shards that are missing: {absent}; copy them into {index.parent}")
    return tuple(shards)


def count_safetensors_bytes(path: Path, number_format: NumberFormat | None = None) -> int:
    """Bytes of the tensors in one safetensors file, which its header states. The arguments, and what is raised, are
    those of `measure_tensors`."""
    return sum(measure_tensors(path, number_format).values())


def measure_tensors(path: Path, number_format: NumberFormat | None = None) -> dict[str, int]:
    """Bytes of each tensor in one safetensors file by its name, which its header states: of floating-point tensors
    those that they take when the model is loaded in this number format, or with None those that are stored.

    Raises `ModelFolderError` when the header is damaged or the file is shorter than its header says.
    """
    try:
        header_bytes, header = _read_header(path)
        tensors = [
            (
                name,
                str(entry["dtype"]),
                tuple(map(operator.index, entry["shape"])),
                *_check_offsets(entry["data_offsets"]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        file_bytes = path.stat().st_size
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ModelFolderError(f"{path} is no readable safetensors file ({error}); copy it again") from error
    expected_bytes = header_bytes + max((end for *_, end in tensors), default=0)
    if file_bytes < expected_bytes:
        raise ModelFolderError(f"{path} is cut short: {file_bytes} of {expected_bytes} bytes; copy it again")
    return {
        name: _count_loaded_bytes(name, shape, number_format)
        if number_format is not None and dtype in _FLOATING_DTYPES
        else end - start
        for name, dtype, shape, start, end in tensors
    }


def _count_loaded_bytes(name: str, shape: tuple[int, ...], number_format: NumberFormat) -> int:
    """Bytes of a floating-point tensor in a number format. Other matrices with names of weights are those of linear
    layers, but for a few small ones."""
    *path, last = name.split(".")
    is_matrix = len(shape) == 2 and last == "weight"
    if number_format == "int8" and is_matrix and not _PLAIN_MATRICES & set(path[-1:]):
        return math.prod(shape) * ELEMENT_BYTES["int8"] + shape[0] * _SCALE_BYTES
    return math.prod(shape) * ELEMENT_BYTES[find_computing_format(number_format)]


def _check_offsets(value: Any) -> tuple[int, int]:
    start, end = map(operator.index, value)
    if not 0 <= start <= end:
        raise ValueError(f"data_offsets {value}")
    return start, end


def is_upcast(folder: Path, family: Family, component: str, number_format: NumberFormat) -> bool:
    """True for a VAE that is loaded in float16 and then served in float32, as by the stock pipeline. Raises
    `ModelFolderError`."""
    if component != VAE or not family.upcasts_vae or number_format != "float16":
        return False
    return bool(read_json(folder / component / "config.json").get("force_upcast", True))


def stage_weights_bytes(
    folder: Path, formats: Mapping[str, NumberFormat] | None = None, image_start: bool = False
) -> dict[Stage, int]:
    """Bytes of the weights of each stage: as stored, or with `formats`, the number format of each component, when they
    are loaded. Modules that are kept in float32 count as the others of their component. `image_start` is as in
    `detect_family`.

    Raises `ModelFolderError` when the folder is incomplete or a file is damaged.
    """
    classes, family = read_component_classes(folder), detect_family(folder, image_start)

    def count_bytes(component: str) -> int:
        number_format: NumberFormat | None = None
        if formats is not None and has_weights(component):
            upcast = is_upcast(folder, family, component, formats[component])
            number_format = "float32" if upcast else formats[component]
        files = list_weight_files(folder, component, classes[component][0])
        return sum(count_safetensors_bytes(path, number_format) for path in files)

    return {
        stage: sum(count_bytes(component) for component in components if component in classes)
        for stage, components in family.components.items()
    }


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """The offset in bytes at which the header of a safetensors file ends, and the header: its length as 8 bytes in
    little endian, then JSON of that length."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"header of {length} bytes")
        return 8 + length, dict(json.loads(file.read(length)).items())


def list_shipped_models() -> list[str]:
    """The names of the models that lie in this package, sorted."""
    return sorted(path.parent.name for path in _SHIPPED.glob(f"*/{MODEL_INDEX}"))


def find_shipped_model(name: str) -> Path:
    """The model folder of a model in this package. Raises `ConfigError` where there is none of this name."""
    if name not in list_shipped_models():
        raise ConfigError(f"no model {name!r} is shipped with TridentServe; use one of {list_shipped_models()}")
    return _SHIPPED / name
