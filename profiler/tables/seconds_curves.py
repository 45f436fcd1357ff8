"""Seconds of a stage at sizes between those that were profiled, of one series: one model, stage, degree and batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from profiler.fitting import fit_sum
from profiler.tables.curves import TokenCurve
from profiler.tables.lengths import StageLength
from tridentserve.requests import Shape

SecondsCurve = Callable[[Shape], float]


def make_seconds_curve(seconds: Mapping[Shape, float], length: StageLength) -> SecondsCurve:
    """A monotone curve through the profiled seconds, in the stage's length. Where that counts frames, the curve is that
    of one frame, in pixels: a VAE decodes a few frames at a time, so that twice as many take twice as long, while a
    frame of twice as many pixels, whose tensors leave the caches, takes longer than that."""
    if not length.by_frames or not all(seconds.values()):
        curve = TokenCurve((length.measure(shape), each) for shape, each in seconds.items())
        return lambda shape: curve.read_nearby(length.measure(shape))
    terms = [(length.measure(shape), 1.0) for shape in seconds]
    _, once_s = fit_sum(terms, list(seconds.values()), most_terms=min(2, len(terms)))
    once_s = min(once_s, *seconds.values()) if len(seconds) > 1 else 0.0
    of_a_frame = TokenCurve(
        (shape.pixels, (each - once_s) / length.count_frames(shape)) for shape, each in seconds.items()
    )
    return lambda shape: once_s + of_a_frame.read_nearby(shape.pixels) * length.count_frames(shape)
