"""Scenes of moving things: what a clip shows, before it is put into words and drawn. A seed decides everything."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lib.default_model import words
from lib.default_model.scenes import MARGIN, DrawnScene, Thing, draw_until, is_held_out, pick_color, pick_turn

# The ways of motion, in shares of the travelled distance (right, down), and their wordings.
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
DIRECTION_WORDINGS = {
    "right": ("moving to the right", "moving right", "that moves to the right"),
    "left": ("moving to the left", "moving left", "that moves to the left"),
    "up": ("moving up", "moving upwards", "that moves up"),
    "down": ("moving down", "moving downwards", "that moves down"),
}
# Two things are harder than one, so that more of the clips that are trained on have two than of the judge's.
JUDGED_KINDS = {"one": 0.6, "two": 0.4}
TRAINED_KINDS = {"one": 0.3, "two": 0.7}
# Of the picture's shorter side.
_DIAMETERS = {"small": (0.2, 0.25), "medium": (0.3, 0.36)}
_DISTANCE = (0.3, 0.55)


@dataclass(frozen=True)
class MovingThing:
    """A thing at the beginning of a clip, and how it moves."""

    thing: Thing
    direction: str
    """One of `DIRECTIONS`."""
    distance: float
    """From the first frame to the last, in shares of the picture's shorter side."""

    def move(self, progress: float) -> Thing:
        """The thing after a share `progress` of the clip. Its speed is constant."""
        right, down = DIRECTIONS[self.direction]
        way = self.distance * progress
        return replace(self.thing, x=self.thing.x + right * way, y=self.thing.y + down * way)


@dataclass(frozen=True)
class MovingScene:
    kind: str
    """One of `JUDGED_KINDS`."""
    things: tuple[MovingThing, ...]
    """Their colors differ."""
    background: str

    @property
    def held_out(self) -> bool:
        """True where no scene with these shapes, colors and directions is trained on."""
        parts = [self.kind, *(f"{part.thing.shape} {part.thing.color} {part.direction}" for part in self.things)]
        return is_held_out(parts)

    def freeze(self, progress: float) -> DrawnScene:
        """The picture after a share `progress` of the clip, from 0 to 1."""
        return DrawnScene("single", tuple(part.move(progress) for part in self.things), self.background)


def draw_motion(rng: random.Random, width: int, height: int, held_out: bool = False) -> MovingScene:
    """Draw a moving scene for a clip of `width` x `height` pixels, trained on or held out for the judge."""
    shorter, kinds = min(width, height), JUDGED_KINDS if held_out else TRAINED_KINDS
    return draw_until(lambda: _try_motion(rng, width / shorter, height / shorter, kinds), held_out)


def _try_motion(rng: random.Random, width: float, height: float, kinds: Mapping[str, float]) -> MovingScene | None:
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    background = rng.choice(["white", *words.BACKGROUNDS])
    things = tuple(_draw_thing(rng, width, height, background) for _ in range(2 if kind == "two" else 1))
    if len({part.thing.color for part in things}) < len(things) or _meet(things):
        return None
    return MovingScene(kind, things, background)


def _draw_thing(rng: random.Random, width: float, height: float, background: str) -> MovingThing:
    """A thing whose whole way lies in the picture."""
    size = rng.choice(list(_DIAMETERS))
    diameter = rng.uniform(*_DIAMETERS[size])
    direction = rng.choice(list(DIRECTIONS))
    right, down = DIRECTIONS[direction]
    reach = diameter / 2 + MARGIN
    distance = min(rng.uniform(*_DISTANCE), (width if right else height) - 2 * reach)
    starts = []
    for step, side in ((right, width), (down, height)):
        lowest, highest = reach + distance * (step < 0), side - reach - distance * (step > 0)
        starts.append(rng.uniform(lowest, highest))
    shape = rng.choice(list(words.SHAPES))
    x, y = starts
    thing = Thing(shape, pick_color(rng, background), size, diameter, x, y, pick_turn(rng, shape))
    return MovingThing(thing, direction, distance)


def _meet(things: tuple[MovingThing, ...]) -> bool:
    """Tell whether two things touch at any time."""
    if len(things) < 2:
        return False
    first, second = things
    least = 0.55 * (first.thing.diameter + second.thing.diameter) + MARGIN
    for index in range(9):
        one, other = first.move(index / 8), second.move(index / 8)
        if math.dist((one.x, one.y), (other.x, other.y)) < least:
            return True
    return False
