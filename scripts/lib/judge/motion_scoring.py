"""Comparison of a clip with the moving scene that was asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lib.default_video.motion import DIRECTIONS, MovingScene
from lib.judge.reading import ReadThing, read_picture

# The least way of a thing that moves, in shares of the shorter side.
_MIN_WAY = 0.1


@dataclass(frozen=True)
class MotionScore:
    """Shares of what was asked for that the clip shows."""

    color: float
    """The share of the things asked for whose color is there in the first, the middle and the last frame."""
    shape: float
    """The share of the things asked for that have their shape in the middle frame."""
    direction: float
    """The share of the things asked for that move where they should, from the first frame to the last."""
    background: float
    """1 where the middle frame has the background asked for."""


def score_clip(scene: MovingScene, clip: np.ndarray) -> MotionScore:
    """Compare a clip of shape (frames, height, width, 3), 8-bit RGB. Things are told apart by their colors."""
    first, middle, last = (read_picture(clip[index]) for index in (0, len(clip) // 2, -1))
    seen = moved = shaped = 0
    for asked in scene.things:
        color = asked.thing.color
        found = [_find(reading.things, color) for reading in (first, middle, last)]
        seen += all(thing is not None for thing in found)
        shaped += found[1] is not None and found[1].shape == asked.thing.shape
        moved += found[0] is not None and found[2] is not None and moves(asked.direction, found[0], found[2])
    number = len(scene.things)
    return MotionScore(seen / number, shaped / number, moved / number, float(middle.background == scene.background))


def moves(direction: str, first: ReadThing, last: ReadThing) -> bool:
    """Tell whether a thing moves to that side: far enough, and more so than across."""
    along, across = first.measure_way(last, DIRECTIONS[direction])
    return along > max(abs(across), _MIN_WAY)


def _find(things: tuple[ReadThing, ...], color: str) -> ReadThing | None:
    return next((thing for thing in things if thing.color == color), None)
