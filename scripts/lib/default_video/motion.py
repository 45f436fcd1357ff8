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
# Two things are harder than one, so that more of the clips that are trained on have two than of the judge's. The judge
# draws the kind again with each try, so that those of two things, which often meet, are fewer than this says.
JUDGED_KINDS = {"one": 0.6, "two": 0.4}
TRAINED_KINDS = {"one": 0.4, "two": 0.6}
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
    """In the order in which captions name them. Their colors differ."""
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
    shorter = min(width, height)
    sides = (width / shorter, height / shorter)
    if held_out:
        return draw_until(lambda: _try_motion(rng, *sides, _draw_kind(rng, JUDGED_KINDS)), held_out)
    kind = _draw_kind(rng, TRAINED_KINDS)
    return draw_until(lambda: _order_as_read(_try_motion(rng, *sides, kind)), held_out)


def _draw_kind(rng: random.Random, kinds: Mapping[str, float]) -> str:
    return rng.choices(list(kinds), list(kinds.values()))[0]


def _try_motion(rng: random.Random, width: float, height: float, kind: str) -> MovingScene | None:
    background = rng.choice(["white", *words.BACKGROUNDS])
    things = tuple(_draw_thing(rng, width, height, background) for _ in range(2 if kind == "two" else 1))
    if len({part.thing.color for part in things}) < len(things) or _meet(things):
        return None
    return MovingScene(kind, things, background)


def _order_as_read(scene: MovingScene | None) -> MovingScene | None:
    """Have captions name the upper thing before the lower, or the left before the right where they lie further apart
    across, in the middle of the clip. In any order, a caption would not say which of two places has which thing: the
    model would have to choose, and often chose the same thing for both."""
    if scene is None or scene.kind == "one":
        return scene
    one, other = (part.move(0.5) for part in scene.things)
    right, down = other.x - one.x, other.y - one.y
    is_read_so = (down if abs(down) > abs(right) else right) > 0
    return scene if is_read_so else replace(scene, things=scene.things[::-1])


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
