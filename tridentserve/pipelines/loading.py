"""From a model folder to an adapter that holds the components of some stages and nothing else."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.utils import is_accelerate_available
from safetensors import SafetensorError

from tridentserve.checkpoints import component_classes, detect_family, weight_files
from tridentserve.errors import CheckpointError
from tridentserve.families import Family
from tridentserve.pipelines.base import PipelineAdapter
from tridentserve.pipelines.diffusers_adapter import DiffusersAdapter
from tridentserve.stages import Stage

_LIBRARIES = {"diffusers": diffusers, "transformers": transformers}


class MetaStub:
    """Stands for a model that was not loaded: its config and what derives from it, without weights.

    Not a Module, so that a pipeline looking for its device or dtype passes over it. Leaving the component out (None)
    would make some pipelines assume defaults silently, such as a VAE scale factor of 8.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def load_adapter(
    folder: Path, stages: frozenset[Stage], *, device: str = "cpu", dtype: torch.dtype | None = None
) -> PipelineAdapter:
    """The adapter of a model folder with the components of `stages` loaded, from local safetensors only.

    `dtype` None means float32 on the CPU and bfloat16 elsewhere. Raises `CheckpointError` when the folder is missing,
    incomplete, damaged, or of a family that is not supported; the message names the file and says what to do.
    """
    if not stages:
        raise CheckpointError(f"no stage of {folder} was asked for; name at least one of {', '.join(Stage)}")
    family = detect_family(folder)
    target = torch.device(device)
    dtype = dtype or (torch.float32 if target.type == "cpu" else torch.bfloat16)
    wanted = {component for stage in stages for component in family.components[stage]}
    components = _components(folder, family, wanted, target, dtype)
    try:
        pipe = getattr(diffusers, family.pipeline_class)(**components)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} does not make a {family.pipeline_class} ({error}); compare its model_index.json with the "
            "original's"
        ) from error
    # A family's adapter lives in the module of its name.
    adapter: type[DiffusersAdapter] = importlib.import_module(f"tridentserve.pipelines.{family.name}").ADAPTER
    return adapter(pipe, stages, target)


def _components(
    folder: Path, family: Family, wanted: set[str], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """All components of the pipeline by name: loaded, a stub, or None."""
    classes = component_classes(folder)
    # Loading is part of a plan: a progress bar per component would only fill the log.
    transformers.utils.logging.disable_progress_bar()
    components: dict[str, Any] = {}
    for name in {component for names in family.components.values() for component in names}:
        library, class_name = classes.get(name, (None, None))
        if library is None or class_name is None:
            components[name] = None
        elif name in wanted:
            components[name] = _load(folder, name, library, class_name, device, dtype)
        else:
            components[name] = _stub(folder, name, library, class_name, dtype)
    return components


def _load(folder: Path, name: str, library: str, class_name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """One component with its weights, on the device, ready for inference."""
    component_class = _component_class(folder, name, library, class_name)
    kwargs: dict[str, Any] = {}
    if weight_files(folder, name, library):
        kwargs = {"use_safetensors": True, "dtype": dtype}
        if library == "diffusers":
            # Asked for explicitly: where accelerate is not installed, the default only adds a warning.
            kwargs["low_cpu_mem_usage"] = is_accelerate_available()
    try:
        component = component_class.from_pretrained(str(folder / name), local_files_only=True, **kwargs)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise _damaged(folder / name, class_name, error) from error
    if not isinstance(component, torch.nn.Module):
        return component
    if isinstance(component, diffusers.ModelMixin) and not component._keep_in_fp32_modules:
        # Without accelerate, diffusers keeps the precision of the file where its first tensor is a float32 buffer.
        torch.nn.Module.to(component, dtype)
    return component.to(device).eval()


def _stub(folder: Path, name: str, library: str, class_name: str, dtype: torch.dtype) -> MetaStub | None:
    """A weightless stand-in for a diffusers model; None for text encoders, tokenizers and schedulers."""
    component_class = _component_class(folder, name, library, class_name)
    if not issubclass(component_class, diffusers.ModelMixin):
        return None
    try:
        with torch.device("meta"):
            model = component_class.from_config(component_class.load_config(str(folder / name), local_files_only=True))
        # Module.to, as diffusers' own `to` warns of precisions that only matter where there are weights.
        return MetaStub(torch.nn.Module.to(model, dtype))
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError) as error:
        raise _damaged(folder / name, class_name, error) from error


def _component_class(folder: Path, name: str, library: str, class_name: str) -> Any:
    component_class = getattr(_LIBRARIES.get(library), class_name, None)
    if component_class is None:
        raise CheckpointError(
            f"{folder / 'model_index.json'} wants {library}.{class_name} for {name!r}, which is not known here; "
            "use a folder whose components are diffusers and transformers classes of the installed versions"
        )
    return component_class


def _damaged(path: Path, class_name: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} cannot be loaded as {class_name} ({error}); copy this folder again")
