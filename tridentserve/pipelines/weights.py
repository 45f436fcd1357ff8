"""The tensors of an adapter's models, which are detached when a replica leaves memory, and attached again later.

They include buffers and plain tensor attributes, and not only the tensors of the model folder: a process that gets all
of them from the copy of another process computes nothing again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tridentserve.errors import ModelFolderError
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.base import PipelineAdapter, Tensors


def named_tensors(adapter: PipelineAdapter) -> Tensors:
    """All tensors of the loaded models by name; of one that consists of others (an int8 weight), these. A tied tensor
    is one object under several names."""
    return {
        part: tensor
        for name, holder, attribute in _walk_holders(adapter)
        for part, tensor in _list_parts(name, holder[attribute])
    }


def attach(adapter: PipelineAdapter, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put these tensors into the models without a copy. Names with the same tensor object are tied.

    Raises `ModelFolderError` unless the names are those of `named_tensors`."""
    holders = list(_walk_holders(adapter))
    if different := set(named_tensors(adapter)) ^ set(tensors):
        raise ModelFolderError(f"these weights are not of this model: {', '.join(sorted(different)[:3])} differ")
    parameters: dict[tuple[int, ...], torch.nn.Parameter] = {}
    for name, holder, attribute in holders:
        held = holder[attribute]
        parts = [tensors[part] for part, _ in _list_parts(name, held)]
        if not isinstance(held, torch.nn.Parameter):
            holder[attribute] = _join_parts(held, parts)
            continue
        key = tuple(map(id, parts))
        if key not in parameters:
            parameters[key] = torch.nn.Parameter(_join_parts(held, parts), requires_grad=False)
        holder[attribute] = parameters[key]


def detach(adapter: PipelineAdapter) -> None:
    """Release all tensors. The models keep only the shapes until the next `attach`."""
    attach(adapter, {name: tensor.to("meta") for name, tensor in named_tensors(adapter).items()})


def _list_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors that a tensor consists of: itself, or those that torch knows to be in it."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    attributes, _ = cast(Any, tensor).__tensor_flatten__()
    for attribute in attributes:
        yield f"{name}.{attribute}", getattr(tensor, attribute)


def _join_parts(like: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor of the kind of `like` that consists of these."""
    if not is_traceable_wrapper_subclass(like):
        return parts[0]
    attributes, context = cast(Any, like).__tensor_flatten__()
    inner = dict(zip(attributes, parts, strict=True))
    joined: torch.Tensor = cast(Any, type(like)).__tensor_unflatten__(inner, context, like.shape, like.stride())
    return joined


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
