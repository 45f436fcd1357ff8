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
_PAIR_DIAMETERS = (0.2, 0.3)
_DISTANCE = (0.3, 0.55)
# Of the height, for the one that moves across where the other moves up or down.
_ACROSS_PART = 0.36


@dataclass(frozen=True)
class Area:
    """A part of the picture, in shares of its shorter side."""

    left: float
    top: float
    right: float
    bottom: float


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
    picture = Area(0.0, 0.0, width / shorter, height / shorter)
    if held_out:
        return draw_until(lambda: _try_motion(rng, picture, _draw_kind(rng, JUDGED_KINDS)), held_out)
    kind = _draw_kind(rng, TRAINED_KINDS)
    draw = _try_motion if kind == "one" else _try_parted_motion
    return draw_until(lambda: draw(rng, picture, kind), held_out)


def _draw_kind(rng: random.Random, kinds: Mapping[str, float]) -> str:
    return rng.choices(list(kinds), list(kinds.values()))[0]


def _try_motion(rng: random.Random, picture: Area, kind: str) -> MovingScene | None:
    """Draw things that are anywhere in the picture. Returns None where they meet or have one color."""
    background = rng.choice(["white", *words.BACKGROUNDS])
    things = []
    for _ in range(2 if kind == "two" else 1):
        size = rng.choice(list(_DIAMETERS))
        diameter = rng.uniform(*_DIAMETERS[size])
        things.append(_draw_thing(rng, picture, background, size, diameter, rng.choice(list(DIRECTIONS))))
    scene = MovingScene(kind, tuple(things), background)
    return None if _share_color(scene) or _meet(scene.things) else scene


def _try_parted_motion(rng: random.Random, picture: Area, kind: str) -> MovingScene | None:
    """Draw two things, each in a part of the picture that is its own. Returns None where they have one color.

    A caption says nothing of places. Where two things may be anywhere, the model has to choose, and chooses in each
    place for itself: it draws a thing twice, or one thing where both meet.
    """
    background = rng.choice(["white", *words.BACKGROUNDS])
    directions = [rng.choice(list(DIRECTIONS)) for _ in range(2)]
    things = [
        _draw_thing(rng, part, background, "small", rng.uniform(*_PAIR_DIAMETERS), direction)
        for part, direction in zip(part_picture(picture, *directions), directions, strict=True)
    ]
    scene = MovingScene(kind, tuple(things), background)
    return None if _share_color(scene) else scene


def part_picture(picture: Area, first: str, second: str) -> tuple[Area, Area]:
    """Part the picture for two things that move in the directions `first` and `second`, in the order in which one
    reads: side by side where both move up or down, else one above the other, with more room for one that moves up or
    down."""
    is_upright = [DIRECTIONS[direction][1] != 0 for direction in (first, second)]
    width, height = picture.right - picture.left, picture.bottom - picture.top
    if all(is_upright):
        middle = picture.left + width / 2
        return replace(picture, right=middle), replace(picture, left=middle)
    share = 0.5 if not any(is_upright) else 1 - _ACROSS_PART if is_upright[0] else _ACROSS_PART
    middle = picture.top + height * share
    return replace(picture, bottom=middle), replace(picture, top=middle)


def _draw_thing(
    rng: random.Random, area: Area, background: str, size: str, diameter: float, direction: str
) -> MovingThing:
    """A thing whose whole way lies in the area."""
    right, down = DIRECTIONS[direction]
    reach = diameter / 2 + MARGIN
    room = area.right - area.left if right else area.bottom - area.top
    distance = min(rng.uniform(*_DISTANCE), room - 2 * reach)
    starts = []
    for step, low, high in ((right, area.left, area.right), (down, area.top, area.bottom)):
        lowest, highest = low + reach + distance * (step < 0), high - reach - distance * (step > 0)
        starts.append(rng.uniform(lowest, highest))
    shape = rng.choice(list(words.SHAPES))
    x, y = starts
    thing = Thing(shape, pick_color(rng, background), size, diameter, x, y, pick_turn(rng, shape))
    return MovingThing(thing, direction, distance)


def _share_color(scene: MovingScene) -> bool:
    return len({part.thing.color for part in scene.things}) < len(scene.things)


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
