"""The load that a service expects: the one that its configuration names, and a default of models of which it names
none."""

from __future__ import annotations

from deployments.config.app import AppArgs
from deployments.config.models import ModelArgs
from deployments.config.planning import LoadArgs
from deployments.models.served import build_served_model
from placement import LoadShare
from tridentserve.errors import ProfileError
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.stages import Stage

# So often are the sides of a default halved at most, to come to a size that was profiled.
_MOST_HALVED = 4


def list_expected_load(args: AppArgs, times: StageTimes | None = None) -> list[LoadShare]:
    """The load of all models. Raises `ModelFolderError` for a model whose folder is needed and not there. `times`: see
    `assume_load`."""
    return [
        LoadShare(entry.model, entry.shape, entry.num_inference_steps, entry.weight)
        for entry in (*args.expected_load, *assume_load(args, times))
    ]


def assume_load(args: AppArgs, times: StageTimes | None = None) -> list[LoadArgs]:
    """The load of the models that `list_unexpected` lists: requests that name neither a size nor steps. With `times`,
    smaller ones where that size was not profiled: a CPU does not measure the largest. Raises `ModelFolderError`."""
    return [_assume_default(model, times) for model in list_unexpected(args)]


def list_unexpected(args: AppArgs) -> list[ModelArgs]:
    """The models of which `expected_load` names no size, where one is needed."""
    expected = {load.model for load in args.expected_load}
    return [model for model in args.models if model.name not in expected] if args.needs_load else []


def _assume_default(model: ModelArgs, times: StageTimes | None) -> LoadArgs:
    served = build_served_model(model)
    shape = served.usual_shape
    if times is not None:
        multiple = served.family.size_multiple
        smaller = (_halve(shape, number, multiple) for number in range(_MOST_HALVED + 1))
        shape = next((each for each in smaller if _is_profiled(model.name, each, times)), shape)
    return LoadArgs(
        model=model.name,
        width=shape.width,
        height=shape.height,
        num_frames=shape.num_frames,
        num_inference_steps=served.default_steps,
    )


def _halve(shape: Shape, number: int, multiple: int) -> Shape:
    """The size with sides halved so many times, in multiples of so many pixels."""
    height, width = (max(multiple, (side >> number) // multiple * multiple) for side in (shape.height, shape.width))
    return Shape(height, width, shape.num_frames)


def _is_profiled(model: str, shape: Shape, times: StageTimes) -> bool:
    try:
        for stage in Stage:
            times.seconds(model, stage, shape)
    except ProfileError:
        return False
    return True
