"""The rules by which requests that differ in size may share denoising steps, the same for all policies."""

from __future__ import annotations

from dispatch.options import DispatchOptions
from tridentserve.requests import BatchKey
from tridentserve.scheduling.estimation.plan_estimates import PACKED_PEAK_FACTOR

# A request joins where a step with it takes less than this share of the steps apart: predictions err by a few percent.
_WORTHWHILE = 0.95
# Rings leave a worker with more than the mean of all: a little more than this many times as much, at the most.
_RING_UNEVENNESS = 2
# Requests that keep to these share packed steps: `exact`, and not alone.
_PLAIN: BatchKey = ("exact", 1.0, None)


def may_mix(options: DispatchOptions, model: str, batch_key: BatchKey, degree: int) -> bool:
    """True where a request without LoRAs may share steps with those of other sizes on so many workers: packed on one,
    and on several where each may have a ring."""
    models = options.pack_sizes if degree == 1 else options.ring_sizes
    return model in models and batch_key == _PLAIN


def count_peaks(number: int, degree: int) -> int:
    """The size of a batch of the largest request whose memory is enough for so many of which some are smaller."""
    return PACKED_PEAK_FACTOR * number * (1 if degree == 1 else _RING_UNEVENNESS)


def is_worthwhile(together_s: float, apart_s: float) -> bool:
    """True where a step of all takes so much less time than the steps apart that requests of other sizes may join."""
    return together_s < _WORTHWHILE * apart_s
