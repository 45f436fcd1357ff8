"""Chooses what the workers of a service run before they take requests: for each model up to three of its sizes."""

from __future__ import annotations

import math
from collections.abc import Collection

from PIL import Image

from deployments.config.app import AppArgs
from deployments.config.models import ModelArgs
from deployments.models.served import ServedModel, build_served_model
from profiler import CostModel
from profiler.tables.rows import ProfileRow
from tridentserve.engine.live.warming.warm_up_runs import WarmUpOrder
from tridentserve.errors import ProfileError
from tridentserve.models.input_image import encode_png
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

# The schedules of all families can be made of so many steps, and with two transformers each has one.
_STEPS = 2
# A size that is expected to take longer is left out: what is slow at its first use matters little beside that.
_LONGEST_S = 60.0
_PROMPT = "a lighthouse on a cliff above the sea"


def plan_warm_up(args: AppArgs, times: CostModel) -> tuple[WarmUpOrder, ...]:
    """The orders for the models that are to be warmed up. `times` is the service's, and is only read. Raises
    `ModelFolderError`."""
    return tuple(_make_order(model, args, times) for model in args.models if _is_warmed(model, args))


def _is_warmed(model: ModelArgs, args: AppArgs) -> bool:
    match args.cluster.warm_up:
        case "always":
            return True
        case "never":
            return False
        case "auto":
            return model.compile or args.cluster.has_gpus


def _make_order(model: ModelArgs, args: AppArgs, times: CostModel) -> WarmUpOrder:
    served = build_served_model(model)
    widest = args.dispatch.max_degree
    degrees = tuple(k for k in times.degrees(model.name, Stage.DIFFUSE) if widest is None or k <= widest)
    shapes = choose_shapes(_list_possible(served, args, times, degrees[:1]), served.usual_shape)
    return WarmUpOrder(model.name, tuple(_make_inputs(served, shape) for shape in shapes), degrees, model.compile)


def choose_shapes(possible: Collection[Shape], usual: Shape) -> list[Shape]:
    """The smallest shape, the one nearest to the usual one, and the largest; ascending and each once."""
    if not possible:
        return []
    ascending = sorted(possible, key=lambda shape: (shape.tokens, shape))
    nearest = min(ascending, key=lambda shape: (abs(shape.tokens - usual.tokens), shape != usual))
    return list(dict.fromkeys((ascending[0], nearest, ascending[-1])))


def _list_possible(served: ServedModel, args: AppArgs, times: CostModel, degrees: tuple[int, ...]) -> set[Shape]:
    """The profiled shapes that requests may ask for, but for those that take long at these degrees."""
    return {
        row.shape
        for row in times.collect_rows(served.name)
        if isinstance(row, ProfileRow)
        and (row.gpu, row.stage, row.batch) == (args.cluster.device_name, Stage.DIFFUSE, 1)
        and row.degree in degrees
        and served.allows(row.shape)
        and _estimate_seconds(served.name, row.shape, row.degree, times) <= _LONGEST_S
    }


def _estimate_seconds(model: str, shape: Shape, degree: int, times: CostModel) -> float:
    """Infinite for a shape of which not all stages were profiled."""
    try:
        encode_s, decode_s = (times.seconds(model, stage, shape) for stage in (Stage.ENCODE, Stage.DECODE))
        return encode_s + _STEPS * times.seconds(model, Stage.DIFFUSE, shape, degree) + decode_s
    except ProfileError:
        return math.inf


def _make_inputs(served: ServedModel, shape: Shape) -> GenerationInputs:
    gray = encode_png(Image.new("RGB", (shape.width, shape.height), "gray"))
    image, mask = gray if served.needs_image else None, gray if served.family.needs_mask else None
    return GenerationInputs(_PROMPT, shape, _STEPS, served.default_guidance_scale, seed=0, image=image, mask=mask)
