"""Loads an adapter from a model folder, with the components of some stages and nothing else."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.guiders import BaseGuidance
from diffusers.utils import is_accelerate_available

from tridentserve.errors import ModelFolderError, TridentServeError
from tridentserve.models.family import Family
from tridentserve.models.model_folder import (
    MODEL_INDEX,
    detect_family,
    is_upcast,
    list_weight_files,
    read_component_classes,
    read_json,
)
from tridentserve.models.number_formats import NumberFormat, NumberFormats, find_computing_format, find_formats
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.adapters.whole import WholeAdapter
from tridentserve.pipelines.base import PipelineAdapter
from tridentserve.pipelines.int8_weights import quantize
from tridentserve.pipelines.lora.lora_layers import Loras
from tridentserve.pipelines.processors import load_image_text_processor
from tridentserve.stages import Stage

_LIBRARIES = {"diffusers": diffusers, "transformers": transformers, "ltx2": diffusers.pipelines.ltx2}
# The class that a component must have, by a word in its name.
_ROLES = {
    "transformer": diffusers.ModelMixin,
    "unet": diffusers.ModelMixin,
    "vae": diffusers.ModelMixin,
    "audio_vae": diffusers.ModelMixin,
    "vocoder": diffusers.ModelMixin,
    "connectors": diffusers.ModelMixin,
    "scheduler": diffusers.SchedulerMixin,
    "text_encoder": transformers.PreTrainedModel,
    "tokenizer": transformers.PreTrainedTokenizerBase,
    "image_encoder": transformers.PreTrainedModel,
    "image_processor": transformers.ImageProcessingMixin,
    "feature_extractor": transformers.ImageProcessingMixin,
    "processor": transformers.ProcessorMixin,
    "guider": BaseGuidance,
}
# Processors of text and images that stand in the place of a tokenizer. Only text is served, so only their tokenizer is
# loaded.
_PROCESSORS = frozenset({"PixtralProcessor"})
# A tokenizer whose files state no length gets 1e30, to which no tensor can be padded.
_MAX_TOKENS = 1_000_000


class MetaStub:
    """Stands for a model that was not loaded. It has the model's config and the values derived from it, but no weights.

    It is not a Module, so that a pipeline that looks for its device or dtype passes over it. Without the component
    (None) some pipelines would silently assume defaults, such as a VAE scale factor of 8.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def load_adapter(
    folder: Path,
    stages: frozenset[Stage],
    *,
    device: str = "cpu",
    formats: Mapping[str, NumberFormat] | None = None,
    weights: bool = True,
    image_start: bool = False,
) -> PipelineAdapter:
    """Load the components of `stages` from the local safetensors of a model folder, and return their adapter.
    `image_start`: requests may start from an image, so that E has the VAE too, where the family allows it.

    `formats` are the number formats of all components of the model, also of those that are not loaded, since stages
    hand on what the next one takes. None means the default of the device (`find_formats`). Without `weights` the models
    are on torch's meta device and get their tensors later (`tridentserve.pipelines.weights`). Raises `ModelFolderError`
    when the folder is missing, incomplete, damaged, or of a family that is not supported; the message names the file
    and states what to do.
    """
    if not stages:
        raise ModelFolderError(f"no stage of {folder} was asked for; name at least one of {', '.join(Stage)}")
    family = detect_family(folder, image_start)
    target = torch.device(device)
    if family.whole and Stage.DIFFUSE not in stages:
        return WholeAdapter(None, stages, target, family)
    formats = formats or find_formats(family, NumberFormats(), device)
    wanted = {component for stage in stages for component in family.components[stage]}
    components = _load_components(folder, family, wanted, target if weights else torch.device("meta"), formats)
    index = read_json(folder / MODEL_INDEX)
    try:
        pipeline_class = getattr(diffusers, family.pipeline_class)
        known = inspect.signature(pipeline_class.__init__).parameters
        options = {name: index[name] for name in family.options if name in index and name in known}
        pipe = pipeline_class(**_list_unused(pipeline_class, components), **components, **options)
        if family.whole:
            return WholeAdapter(pipe, stages, target, family)
        # The module of the family's name holds its adapter.
        module = importlib.import_module(f"tridentserve.pipelines.adapters.{family.name}")
        adapter: type[DiffusersAdapter] = module.ADAPTER
        loaded = adapter(pipe, stages, target)
        loaded.described = family
        loaded.read_predictor(folder)
        loaded.loras = Loras(pipe, family.components[Stage.DIFFUSE][0], target)
        return loaded
    except (TridentServeError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Any error of diffusers here means that the components do not fit together.
        raise ModelFolderError(
            f"{folder} does not make a {family.pipeline_class} ({error}); compare its model_index.json with the "
            "original's"
        ) from error


def _list_unused(pipeline_class: Any, components: Mapping[str, Any]) -> dict[str, None]:
    """The required arguments of a pipeline that no stage runs, such as a safety checker."""
    parameters = inspect.signature(pipeline_class.__init__).parameters
    return {
        name: None
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name != "self" and name not in components
    }


def _load_components(
    folder: Path, family: Family, wanted: set[str], device: torch.device, formats: Mapping[str, NumberFormat]
) -> dict[str, Any]:
    """All components of the pipeline by name. Each is loaded, or a stub, or None."""
    classes = read_component_classes(folder)
    # Loading is part of a plan: a progress bar per component would only fill the log.
    transformers.utils.logging.disable_progress_bar()
    # Warnings that a prompt was cut off, as the stock pipelines do, would put parts of prompts into the log.
    transformers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.set_verbosity_error()
    components: dict[str, Any] = {}
    for name in {component for names in family.components.values() for component in names}:
        if name not in classes:
            components[name] = None
        elif name in wanted:
            components[name] = _load(folder, name, *classes[name], device, formats)
            if name in formats and is_upcast(folder, family, name, formats[name]):
                components[name].to(torch.float32)
        else:
            components[name] = _make_stub(folder, name, *classes[name], formats)
    return components


def _load(
    folder: Path, name: str, library: str, class_name: str, device: torch.device, formats: Mapping[str, NumberFormat]
) -> Any:
    """Load one component with its weights onto the device, ready for inference."""
    component_class = _find_component_class(folder, name, library, class_name)
    if device == torch.device("meta") and issubclass(component_class, torch.nn.Module):
        return _build_on_meta(folder / name, component_class, formats[name]).eval()
    if issubclass(component_class, transformers.ProcessorMixin):
        with _report_damage(folder / name, class_name):
            processor = load_image_text_processor(folder / name)
        _check_tokenizer(folder / name, processor.tokenizer)
        return processor
    if not list_weight_files(folder, name, library):
        with _report_damage(folder / name, class_name):
            component = component_class.from_pretrained(str(folder / name), local_files_only=True)
        _check_tokenizer(folder / name, component)
        return component
    dtype = _find_dtype(formats[name])
    # The loading info names missing tensors, which otherwise get random values and only a warning.
    kwargs: dict[str, Any] = {"use_safetensors": True, "dtype": dtype, "output_loading_info": True}
    if issubclass(component_class, diffusers.ModelMixin):
        # The value is explicit, because the default adds a warning where accelerate is not installed.
        kwargs["low_cpu_mem_usage"] = is_accelerate_available()
    else:
        # `_check_complete` reports these tensors by name, whereas transformers only refers to its log.
        kwargs["ignore_mismatched_sizes"] = True
    loaded_class = component_class
    if _list_kept(component_class) and not is_accelerate_available():
        loaded_class = _make_keeping_class(component_class, dtype)
    with _report_damage(folder / name, class_name):
        component, info = loaded_class.from_pretrained(str(folder / name), local_files_only=True, **kwargs)
    _check_complete(folder / name, class_name, info)
    if loaded_class is not component_class:
        component.__class__ = component_class
        convert_tensors(component, dtype, _list_kept(component_class))
    if isinstance(component, diffusers.ModelMixin) and not component._keep_in_fp32_modules:
        # Without accelerate diffusers keeps the precision of a file whose first tensor is a float32 buffer.
        torch.nn.Module.to(component, dtype)
    if formats[name] == "int8":
        quantize(component)
    return component.to(device).eval()


def _find_dtype(number_format: NumberFormat) -> torch.dtype:
    """The type of the numbers with which a model in this number format computes."""
    dtype: torch.dtype = getattr(torch, find_computing_format(number_format))
    return dtype


def _list_kept(component_class: Any) -> list[str]:
    """The modules of a model of diffusers that it keeps in float32 in all number formats."""
    is_diffusers = issubclass(component_class, diffusers.ModelMixin)
    return (component_class._keep_in_fp32_modules or []) if is_diffusers else []


def _make_keeping_class(component_class: Any, dtype: torch.dtype) -> Any:
    """Make a class that loads the same model without accelerate, with which alone diffusers keeps modules in float32.
    The model has its number formats before its tensors are copied into it, so that none of them is read in another."""

    def from_config(cls: Any, *arguments: Any, **options: Any) -> Any:
        model = component_class.from_config.__func__(cls, *arguments, **options)
        convert_tensors(model, dtype, _list_kept(component_class))
        return model

    own = {"_keep_in_fp32_modules": None, "from_config": classmethod(from_config)}
    return type(component_class.__name__, (component_class,), own)


def convert_tensors(model: torch.nn.Module, dtype: torch.dtype, kept: Collection[str]) -> None:
    """Convert the model's stored tensors to this number format, and those of the modules `kept` to float32."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if set(kept) & set(name.split(".")) else dtype)


def _check_complete(path: Path, class_name: str, info: Mapping[str, Any]) -> None:
    """Raise `ModelFolderError` unless every tensor of the model came from the files. Tied tensors (T5's embeddings) are
    not among the missing keys."""
    for what, keys in (("lack", info["missing_keys"]), ("have another shape for", info["mismatched_keys"])):
        names = sorted(key if isinstance(key, str) else str(key[0]) for key in keys)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelFolderError(
                f"the weights in {path} {what} tensors of {class_name}: {', '.join(names[:3])}{more}; copy this folder "
                "again, with the config.json that belongs to it"
            )


def _check_tokenizer(path: Path, component: Any) -> None:
    """Raise `ModelFolderError` unless a tokenizer's vocabulary came from files: transformers makes an empty one where
    there are none."""
    if not isinstance(component, transformers.PreTrainedTokenizerBase):
        return
    if isinstance(component, transformers.ByT5Tokenizer):
        return  # ByT5 needs no vocabulary, and its pipeline states the length.
    files = dict(component.vocab_files_names)
    fast = files.pop("tokenizer_file", "tokenizer.json")
    absent = [file for file in files.values() if not (path / file).is_file()]
    if not (path / fast).is_file() and (absent or not files):
        raise ModelFolderError(f"{path} has neither {fast} nor {' and '.join(files.values())}; copy this folder again")
    if component.chat_template is None and component.model_max_length > _MAX_TOKENS:
        raise ModelFolderError(f"{path / 'tokenizer_config.json'} gives no model_max_length; copy this folder again")


def _make_stub(
    folder: Path, name: str, library: str, class_name: str, formats: Mapping[str, NumberFormat]
) -> MetaStub | None:
    """Make a stub of a diffusers model, or None for text encoders, tokenizers and schedulers."""
    component_class = _find_component_class(folder, name, library, class_name)
    if not issubclass(component_class, diffusers.ModelMixin):
        return None
    return MetaStub(_build_on_meta(folder / name, component_class, formats[name]))


def _build_on_meta(path: Path, component_class: Any, number_format: NumberFormat) -> torch.nn.Module:
    """Build the structure of a model on the meta device from its config, each tensor in the number format in which it
    is loaded."""
    dtype = _find_dtype(number_format)
    with _report_damage(path, component_class.__name__), torch.device("meta"):
        if issubclass(component_class, diffusers.ModelMixin):
            model = component_class.from_config(component_class.load_config(str(path), local_files_only=True))
            kept = _list_kept(component_class)
        else:
            config = component_class.config_class.from_pretrained(str(path), local_files_only=True)
            model = component_class._from_config(config, dtype=dtype)
            # T5 keeps one of its layers in float32 where the others are in float16.
            kept = list(model._get_dtype_plan(dtype))
        # This is Module.to, since diffusers' own `to` warns of precisions that matter only for weights.
        lowered: torch.nn.Module = torch.nn.Module.to(model, dtype)
        convert_tensors(lowered, dtype, kept)
    if number_format == "int8":
        quantize(lowered)
    return lowered


def _find_component_class(folder: Path, name: str, library: str, class_name: str) -> Any:
    role = next((role for word, role in _ROLES.items() if word in name), None)
    if role is transformers.PreTrainedTokenizerBase and class_name in _PROCESSORS:
        return transformers.AutoTokenizer
    if role is transformers.ImageProcessingMixin:
        # Pillow's processor gives the same pixels whether or not torchvision, whose resizing differs, is installed.
        class_name = f"{class_name.removesuffix('Pil').removesuffix('Fast')}Pil"
    try:
        component_class = getattr(_find_library(library), class_name, None)
    except (ImportError, AttributeError):  # The class has dependencies that are not installed, or no such library.
        component_class = None
    if not (isinstance(component_class, type) and issubclass(component_class, role or tuple(_ROLES.values()))):
        raise ModelFolderError(
            f"{folder / 'model_index.json'} wants {library}.{class_name} for {name!r}, which is not known here as a "
            f"{role.__name__ if role is not None else 'component'}; use a folder whose components are diffusers and "
            "transformers classes of the installed versions"
        )
    config = folder / name / "config.json"
    if issubclass(component_class, diffusers.ModelMixin) and config.is_file():
        # A model of another class would be built at that class's default size before the difference shows.
        saved = read_json(config).get("_class_name", class_name)
        if saved != class_name:
            raise ModelFolderError(
                f"{folder / 'model_index.json'} wants {class_name} for {name!r} but {config} is of {saved!r}; "
                "copy both again from one model"
            )
    return component_class


def _find_library(name: str) -> Any:
    """A library, or the package of diffusers that has a pipeline with components of its own, such as a safety
    checker."""
    return _LIBRARIES[name] if name in _LIBRARIES else getattr(diffusers.pipelines, name)


@contextmanager
def _report_damage(path: Path, class_name: str) -> Iterator[None]:
    """Report every error of the libraries, except a lack of memory, as damage of this directory."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelFolderError(f"{path} cannot be loaded as {class_name} ({error}); copy this folder again") from error
