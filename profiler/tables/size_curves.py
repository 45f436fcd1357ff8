"""What a stage costs at sizes between those that were profiled, of one series: one model, stage, degree and batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from profiler.fitting import fit_sum
from profiler.tables.curves import TokenCurve
from profiler.tables.lengths import StageLength
from tridentserve.requests import Shape

SizeCurve = Callable[[Shape], float]


def make_size_curve(values: Mapping[Shape, float], length: StageLength) -> SizeCurve:
    """A monotone curve through the profiled values (seconds or bytes), in the stage's length. Where that counts frames,
    the curve is that of one frame, in pixels: a VAE decodes a few frames at a time, so that twice as many take twice as
    long, while a frame of twice as many pixels, whose tensors leave the caches, takes longer than that."""
    if not length.by_frames or not all(values.values()):
        curve = TokenCurve((length.measure(shape), value) for shape, value in values.items())
        return lambda shape: curve.read_nearby(length.measure(shape))
    terms = [(length.measure(shape), 1.0) for shape in values]
    _, fitted = fit_sum(terms, list(values.values()), most_terms=min(2, len(terms)))
    once = min(fitted, *values.values()) if len(values) > 1 else 0.0
    of_a_frame = TokenCurve(
        (shape.pixels, (value - once) / length.count_frames(shape)) for shape, value in values.items()
    )
    return lambda shape: once + of_a_frame.read_nearby(shape.pixels) * length.count_frames(shape)
