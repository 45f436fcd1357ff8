"""The served model that a request gets, and the sizes that it can make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deployments.models.served import ServedModel
from tridentserve.errors import InvalidRequestError, UnknownModelError
from tridentserve.models.input_image import IMAGE_START_SETTING

_ROUTES = {
    "makes images": "/v1/images/generations",
    "edits images": "/v1/images/edits",
    "makes videos": "/v1/videos",
}

_DEFAULT_NAME = "default"


def choose_model(
    name: str | None, models: Mapping[str, ServedModel], videos: bool, from_image: bool = False
) -> ServedModel:
    """The model of this name, or the first one that fits: each route takes models of one kind only.
    Raises `UnknownModelError`, and `InvalidRequestError` for a model that is not allowed to start from an image."""
    name = resolve_name(name, models)
    kind = _name_kind(videos, from_image)
    fitting = {key: model for key, model in models.items() if _fits(model, videos, from_image)}
    if from_image and not videos:
        _check_image_start(name, models, fitting)
    if name is not None and name in models and name not in fitting:
        if from_image and not videos and not models[name].makes_videos:
            raise UnknownModelError(
                "model: this one makes images from text alone; send it the prompt without an image", "model"
            )
        other = _name_kind(models[name].makes_videos, models[name].needs_image)
        raise UnknownModelError(f"model: this one {other}; send the request to {_ROUTES[other]}", "model")
    if not fitting:
        raise UnknownModelError(f"model: none of the served models {kind}", "model")
    if name is not None and name not in fitting:
        raise make_unknown_model_error(fitting)
    if name is not None:
        return fitting[name]
    alike = (model for model in fitting.values() if model.takes_image == from_image or model.family.starts_from_image)
    open_to_both = (model for model in fitting.values() if not model.needs_image)
    return next(alike, next(open_to_both, next(iter(fitting.values()))))


def _check_image_start(name: str | None, models: Mapping[str, ServedModel], fitting: Mapping[str, ServedModel]) -> None:
    """Raise `InvalidRequestError` where the model of this name, or the first of those that a request without a name can
    get, could start from an image and is not allowed to."""
    asked = list(models.values()) if name is None else [models[name]] if name in models else []
    if any(model.name in fitting for model in asked):
        return
    for model in asked:
        if model.family.image_start is not None:
            raise InvalidRequestError(f"image: {model.name} starts from a prompt alone; {IMAGE_START_SETTING}", "image")


def resolve_name(name: str | None, models: Mapping[str, ServedModel]) -> str | None:
    """The name of the model that a client means, also by its folder or its id on the hub, which `GET /v1/model_info`
    tells. None for the name that SGLang's benchmark sends where it was given no model."""
    if name is None or name in models:
        return name
    of_origin = next((model.name for model in models.values() if model.origin == name), name)
    return None if of_origin == _DEFAULT_NAME else of_origin


def make_unknown_model_error(served: Iterable[str]) -> UnknownModelError:
    there = f"there are {names}" if (names := ", ".join(served)) else "no model is, at the moment"
    return UnknownModelError(f"model: this model is not served; {there}", "model")


def _fits(model: ServedModel, videos: bool, from_image: bool) -> bool:
    """True where a route of this kind takes the model. The route of videos tells by itself which takes an image."""
    if videos or model.makes_videos:
        return videos and model.makes_videos
    return model.takes_image if from_image else not model.needs_image


def _name_kind(videos: bool, from_image: bool) -> str:
    """The kind of a model, a key of `_ROUTES`."""
    return "makes videos" if videos else "edits images" if from_image else "makes images"


def check_size(width: int, height: int, param: str, model: ServedModel) -> None:
    """Raises `InvalidRequestError`, which names the field `param`, for a size that the model cannot make."""
    limits, multiple = model.limits, model.family.size_multiple
    if width % multiple or height % multiple:
        raise InvalidRequestError(f"{param}: width and height must be multiples of {multiple} for this model", param)
    if min(width, height) < limits.min_side or max(width, height) > limits.max_side:
        raise InvalidRequestError(
            f"{param}: width and height must be {limits.min_side} to {limits.max_side} for this model", param
        )
    if width * height > limits.max_pixels:
        raise InvalidRequestError(
            f"{param}: width times height must be at most {limits.max_pixels} pixels for this model",
            param,
        )
