"""The mutable state of a diffusers scheduler as plain tensors and JSON-able values, so that a request can move.

A scheduler changes only its `__dict__` while it runs; its config is fixed and is not moved. The tree of values mirrors
that dictionary, with each tensor replaced by a reference to an entry of the dictionary of tensors.
"""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import numpy as np
import torch

from tridentserve.device import find_device
from tridentserve.errors import HandoffError, InvalidRequestError
from tridentserve.pipelines.base import Tensors

_CONFIG = "_internal_dict"


def make_scheduler(prototype: Any, flow_shift: float | None = None) -> Any:
    """Make a new scheduler of the same class and config, but for a `flow_shift` that a request asks for. Every request
    has its own; making one takes 0.3 to 0.9 ms. Raises `InvalidRequestError` for a scheduler without such a shift."""
    changes = {} if flow_shift is None else {_find_shift_name(prototype): flow_shift}
    return type(prototype).from_config(prototype.config, **changes)


def _find_shift_name(scheduler: Any) -> str:
    """The config entry of a scheduler that shifts the noise levels of flow matching."""
    config, known = scheduler.config, inspect.signature(type(scheduler)).parameters
    if "shift" in known and not config.get("use_dynamic_shifting"):
        return "shift"
    if "flow_shift" in known and config.get("use_flow_sigmas"):
        return "flow_shift"
    name = type(scheduler).__name__
    raise InvalidRequestError(f"flow_shift: this model's scheduler ({name}) has no fixed shift", "flow_shift")


def draws_noise(scheduler: Any) -> bool:
    """True when the scheduler's steps may draw noise from a generator that they are given."""
    if isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler):
        return bool(scheduler.config.stochastic_sampling)
    return "generator" in inspect.signature(scheduler.step).parameters


def dump(scheduler: Any, prefix: str = "scheduler.") -> tuple[Tensors, dict[str, Any]]:
    """Return the state of a scheduler: tensors, whose names begin with `prefix`, and a JSON-able tree of values.

    Raises `HandoffError` when the scheduler holds an object that cannot be moved, such as a generator.
    """
    tensors: Tensors = {}
    values = {
        name: _flatten(value, f"{prefix}{name}", tensors) for name, value in vars(scheduler).items() if name != _CONFIG
    }
    return tensors, values


def load(scheduler: Any, tensors: Tensors, values: dict[str, Any], device: torch.device) -> None:
    """Put a dumped state into a scheduler of the same class and config. Tensors that the scheduler kept on the host
    stay there; the other tensors move to `device`."""
    for name, value in values.items():
        setattr(scheduler, name, _restore(value, tensors, device))


def _flatten(value: Any, path: str, tensors: Tensors) -> Any:
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {"tensor": path, "host": find_device(value.device).is_host}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(value)
        return {"array": path}
    if isinstance(value, np.generic):
        return {"scalar": value.item(), "dtype": value.dtype.name}
    if isinstance(value, list | tuple):
        items = [_flatten(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return {type(value).__name__: items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _flatten(item, f"{path}.{key}", tensors) for key, item in value.items()}}
    raise HandoffError(
        f"the scheduler state {path} is a {type(value).__name__}, which cannot be moved between workers; "
        "use a scheduler without such state (a deterministic one)"
    )


def _restore(value: Any, tensors: Tensors, device: torch.device) -> Any:
    match value:
        case {"tensor": path, "host": host}:
            return tensors[path].to("cpu" if host else device)
        case {"array": path}:
            return tensors[path].cpu().numpy()
        case {"scalar": item, "dtype": dtype}:
            return np.dtype(dtype).type(item)
        case {"list": items}:
            return [_restore(item, tensors, device) for item in items]
        case {"tuple": items}:
            return tuple(_restore(item, tensors, device) for item in items)
        case {"dict": items}:
            return {key: _restore(item, tensors, device) for key, item in items.items()}
        case _:
            return value
