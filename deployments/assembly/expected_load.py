"""The load that a service expects: the one that its configuration names, and a default of models of which it names
none."""

from __future__ import annotations

from deployments.config.app import AppArgs
from deployments.config.models import ModelArgs
from deployments.config.planning import LoadArgs
from deployments.models.served import build_served_model
from placement import LoadShare


def list_expected_load(args: AppArgs) -> list[LoadShare]:
    """The load of all models. Raises `ModelFolderError` for a model whose folder is needed and not there."""
    return [
        LoadShare(entry.model, entry.shape, entry.num_inference_steps, entry.weight)
        for entry in (*args.expected_load, *assume_load(args))
    ]


def assume_load(args: AppArgs) -> list[LoadArgs]:
    """The load of the models that `list_unexpected` lists: requests that name neither a size nor steps. Raises
    `ModelFolderError`."""
    return [_assume_default(model) for model in list_unexpected(args)]


def list_unexpected(args: AppArgs) -> list[ModelArgs]:
    """The models of which `expected_load` names no size, where one is needed."""
    expected = {load.model for load in args.expected_load}
    return [model for model in args.models if model.name not in expected] if args.needs_load else []


def _assume_default(model: ModelArgs) -> LoadArgs:
    served = build_served_model(model)
    shape = served.usual_shape
    return LoadArgs(
        model=model.name,
        width=shape.width,
        height=shape.height,
        num_frames=shape.num_frames,
        num_inference_steps=served.default_steps,
    )
