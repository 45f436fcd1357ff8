"""Chooses the sizes at which a model is measured when nobody names any."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

from tridentserve.models.family import Family
from tridentserve.requests import Shape

# Neighbouring sizes differ by at most this factor in tokens, as far as there are sizes between them: the curve through
# them then knows where a cost that is even at small sizes begins to grow.
_MOST_GROWTH = 6.0


@dataclass(frozen=True, slots=True)
class SizeRange:
    """The sizes that requests of a model may ask for."""

    smallest: Shape
    usual: Shape
    """The size of a request that names none."""
    largest: Shape
    """The shape with the most tokens."""

    def cap_sides(self, family: Family, most: int | None) -> SizeRange:
        """The same range where the model makes no side above `most`."""
        if most is None:
            return self
        return SizeRange(*(_cap_sides(shape, most - most % family.size_multiple) for shape in self._shapes))

    def choose_sizes(self, family: Family) -> list[Shape]:
        """The three sizes, and enough between them, ascending in tokens."""
        named = sorted(set(self._shapes), key=lambda shape: shape.tokens)
        found = named[:1]
        for low, high in pairwise(named):
            found += [*_choose_between(low, high, family), high]
        return found

    def choose_vae_sizes(self, family: Family) -> list[Shape]:
        """The sizes for a stage in which a VAE works, ascending in pixels of all frames: the same, and the smallest
        with the most frames. Sides and frames grow together in the others, which leaves open what a frame costs."""
        sizes = self.choose_sizes(family)
        most = max(shape.num_frames for shape in sizes)
        long = Shape(self.smallest.height, self.smallest.width, most)
        return sorted({*sizes, long}, key=lambda shape: (shape.pixels * shape.num_frames, shape))

    @property
    def _shapes(self) -> tuple[Shape, Shape, Shape]:
        return self.smallest, self.usual, self.largest


def _cap_sides(shape: Shape, most: int) -> Shape:
    return Shape(min(shape.height, most), min(shape.width, most), shape.num_frames)


def _choose_between(low: Shape, high: Shape, family: Family) -> list[Shape]:
    """Sizes between two, so that no neighbours are further apart than `_MOST_GROWTH`."""
    if high.tokens <= _MOST_GROWTH * low.tokens:
        return []
    middle = Shape(
        _round_to(sqrt(low.height * high.height), family.size_multiple),
        _round_to(sqrt(low.width * high.width), family.size_multiple),
        1 + _round_to(sqrt(low.num_frames * high.num_frames) - 1, family.frame_multiple or 1),
    )
    if not low.tokens < middle.tokens < high.tokens:
        return []
    return [*_choose_between(low, middle, family), middle, *_choose_between(middle, high, family)]


def _round_to(value: float, multiple: int) -> int:
    return round(value / multiple) * multiple
