"""Fewer denoising steps for a request that would be late with those that were asked for (`on_late: degrade`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tridentserve.requests import RequestSpec
from tridentserve.scheduling.prediction.predictor import Quote

# No request is made with less than this share of its steps.
LEAST_SHARE = 0.5


def find_fewer_steps(
    spec: RequestSpec, predict: Callable[[RequestSpec], Quote | None]
) -> tuple[RequestSpec, Quote] | None:
    """The request with the most steps, fewer than it has and at least `LEAST_SHARE` of them, with which `predict` says
    that it is in time, and that prediction; None where it would be late even with the fewest. It is found by halving,
    as fewer steps do not take longer."""

    def try_steps(steps: int) -> tuple[RequestSpec, Quote] | None:
        fewer = replace(spec, num_inference_steps=steps)
        quote = predict(fewer)
        return None if quote is None or quote.is_late else (fewer, quote)

    least, most = math.ceil(LEAST_SHARE * spec.num_inference_steps), spec.num_inference_steps - 1
    best = try_steps(least) if least <= most else None
    while best is not None and least < most:
        middle = (least + most + 1) // 2
        if (found := try_steps(middle)) is not None:
            best, least = found, middle
        else:
            most = middle - 1
    return best
