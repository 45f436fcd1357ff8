"""The length of a size by which a stage costs more: tokens for D, and for E and C what rows say of frames.

A transformer works on tokens, and of all frames after the first of a video four make a latent one. The decoder of a
VAE works on latent frames in its first layers, and on every frame that is seen in its last ones, which cost most. How
much a further frame costs beside the first depends on the VAE, so it is read from the profiled rows. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from profiler.fitting import fit_sum
from profiler.tables.curves import TokenCurve
from profiler.tables.rows import ProfileRow
from tridentserve.requests import PIXELS_PER_TOKEN, Shape
from tridentserve.stages import Stage

SizeCurve = Callable[[Shape], float]

# The share of a frame after the first that `Shape.tokens` counts.
_TOKENS_SHARE = 0.25
# VAEs make up to eight frames of a latent one, so that all their layers work on at least this share of a frame, and
# none on more than the whole of it. A fit that says otherwise has seen too few sizes, or that costs grow with the size.
_LEAST_SHARE, _MOST_SHARE = 0.125, 1.0


@dataclass(frozen=True, slots=True)
class StageLength:
    """The length of sizes for one stage of one model."""

    frame_share: float = _TOKENS_SHARE
    """The cost of each frame after the first, relative to that of the first."""
    video_share: float = 0.0
    """The cost of all frames after the first together in addition, however many they are."""
    by_frames: bool = False
    """True where rows say what a frame costs."""

    def count_frames(self, shape: Shape) -> float:
        """The frames of a size, as many first ones as cost as much."""
        return 1 + self.frame_share * (shape.num_frames - 1) + self.video_share * (shape.num_frames > 1)

    def measure(self, shape: Shape) -> float:
        """The length of a size, in tokens of a first frame."""
        return shape.pixels / PIXELS_PER_TOKEN * self.count_frames(shape)


def fit_length(rows: Collection[ProfileRow]) -> StageLength:
    """The length by which the seconds of these rows grow, which are of one model, stage, degree and batch: tokens for D
    and where all sizes have the same number of frames."""
    timed = [row for row in rows if row.seconds > 0]  # a table may say that a stage takes no time
    if not _can_tell_frames(rows) or not timed:
        return StageLength()
    terms = [(row.shape.pixels, row.shape.pixels * (row.shape.num_frames - 1), 1.0) for row in timed]
    first_s, further_s, _ = fit_sum(terms, [row.seconds for row in timed], most_terms=min(len(timed), len(terms[0])))
    if not further_s:
        return StageLength(_LEAST_SHARE, by_frames=True) if first_s else StageLength()
    share = further_s / first_s if first_s else _MOST_SHARE
    return StageLength(min(max(share, _LEAST_SHARE), _MOST_SHARE), by_frames=True)


def fit_peak_length(rows: Collection[ProfileRow]) -> StageLength:
    """The length by which the memory peaks of these rows grow. Most decoders of videos work on a few frames at a time:
    they take more for two latent frames than for one, but hardly more for twenty. That is assumed where rows are of two
    numbers of frames only, and expects too much, not too little, of a decoder that takes all frames at once."""
    held = [row for row in rows if row.peak_bytes > 0]
    if not _can_tell_frames(held) or len({row.peak_bytes for row in held}) < 2:
        return StageLength()
    terms = []
    for row in held:
        pixels, further = row.shape.pixels, row.shape.num_frames - 1
        terms.append((1, pixels * further, pixels, pixels * (further > 0)))
    peaks = [row.peak_bytes for row in held]
    _, each_further, first, any_further = fit_sum(terms, peaks, most_terms=min(len(held), len(terms[0])))
    if not first:  # no row is of one frame
        first, any_further = any_further, 0.0
    if not first:
        return StageLength(_MOST_SHARE, by_frames=True) if each_further else StageLength()
    return StageLength(each_further / first, any_further / first, by_frames=True)


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


def _can_tell_frames(rows: Collection[ProfileRow]) -> bool:
    return not any(row.stage is Stage.DIFFUSE for row in rows) and len({row.shape.num_frames for row in rows}) > 1
