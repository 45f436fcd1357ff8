"""Less work for a request that would be late with all of it (`on_late: degrade`): a lower quality of its denoising
steps, or fewer of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tridentserve.requests import RequestSpec
from tridentserve.scheduling.prediction.predictor import Quote

# No request is made with less than this share of its steps.
LEAST_SHARE = 0.5
# Fewer steps are to end within this share of the time to the deadline. A prediction is as often too short as too long:
# with all of the time, half of these requests would be late all the same.
USED_SHARE = 0.85


def find_less_work(
    spec: RequestSpec, cheaper: RequestSpec | None, predict: Callable[[RequestSpec], Quote | None]
) -> tuple[RequestSpec, Quote] | None:
    """The request in the lower quality, `cheaper`, if it has one and `predict` says that all its steps end within
    `USED_SHARE` of its time so; otherwise with fewer steps, in that quality if there is one."""
    if cheaper is None:
        return _find_fewer_steps(spec, predict)
    quote = predict(cheaper)
    if quote is not None and quote.seconds <= USED_SHARE * quote.slo_s:
        return cheaper, quote
    return _find_fewer_steps(cheaper, predict)


def _find_fewer_steps(
    spec: RequestSpec, predict: Callable[[RequestSpec], Quote | None]
) -> tuple[RequestSpec, Quote] | None:
    """The request with the most steps, fewer than it has and at least `LEAST_SHARE` of them, with which `predict` says
    that it ends within `USED_SHARE` of its time, and that prediction; with `LEAST_SHARE` of them where it is in time so
    at least, and None where it would be late even then. It is found by halving, as fewer steps do not take longer."""

    def try_steps(steps: int, share: float) -> tuple[RequestSpec, Quote] | None:
        fewer = replace(spec, num_inference_steps=steps)
        quote = predict(fewer)
        return None if quote is None or quote.seconds > share * quote.slo_s else (fewer, quote)

    least, most = math.ceil(LEAST_SHARE * spec.num_inference_steps), spec.num_inference_steps - 1
    best = try_steps(least, 1.0) if least <= most else None
    while best is not None and least < most:
        middle = (least + most + 1) // 2
        if (found := try_steps(middle, USED_SHARE)) is not None:
            best, least = found, middle
        else:
            most = middle - 1
    return best
