"""The tensors of an adapter's models, which are detached when a replica leaves memory, and attached again later.

They include buffers and plain tensor attributes, and not only the tensors of the model folder: a process that gets all
of them from the copy of another process computes nothing again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from tridentserve.errors import ModelFolderError
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.base import PipelineAdapter, Tensors


def named_tensors(adapter: PipelineAdapter) -> Tensors:
    """All tensors of the loaded models by name. A tied tensor is one object under several names."""
    return {name: holder[attribute] for name, holder, attribute in _walk_holders(adapter)}


def attach(adapter: PipelineAdapter, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put these tensors into the models without a copy. Names with the same tensor object are tied.

    Raises `ModelFolderError` unless the names are those of `named_tensors`."""
    holders = list(_walk_holders(adapter))
    if different := {name for name, _, _ in holders} ^ set(tensors):
        raise ModelFolderError(f"these weights are not of this model: {', '.join(sorted(different)[:3])} differ")
    parameters = {id(tensor): torch.nn.Parameter(tensor, requires_grad=False) for tensor in tensors.values()}
    for name, holder, attribute in holders:
        is_parameter = isinstance(holder[attribute], torch.nn.Parameter)
        holder[attribute] = parameters[id(tensors[name])] if is_parameter else tensors[name]


def detach(adapter: PipelineAdapter) -> None:
    """Release all tensors. The models keep only the shapes until the next `attach`."""
    attach(adapter, {name: tensor.to("meta") for name, tensor in named_tensors(adapter).items()})


def _walk_holders(adapter: PipelineAdapter) -> Iterator[tuple[str, Any, Any]]:
    """Yield each tensor's name, with the container and the key under which its module holds it."""
    components = cast(DiffusersAdapter, adapter).pipe.components
    for component, model in sorted(components.items()):
        if not isinstance(model, torch.nn.Module):
            continue
        for path, module in model.named_modules():
            for holder in (module._parameters, module._buffers, vars(module)):
                for names, container, key in _walk_container(holder, adapter.is_rebuilt):
                    yield ".".join(filter(None, (component, path, *names))), container, key


def _walk_container(container: Any, is_deep: bool) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield the path, the container and the key of each tensor in a dictionary or a list. `is_deep`: also of those in
    the dictionaries and lists in it, but for what torch keeps of a module (`_parameters` and the like)."""
    for key, value in list(enumerate(container) if isinstance(container, list) else container.items()):
        if isinstance(value, torch.Tensor):
            yield (str(key),), container, key
        elif is_deep and isinstance(value, dict | list) and not str(key).startswith("_"):
            for names, inner, inner_key in _walk_container(value, is_deep):
                yield (str(key), *names), inner, inner_key
