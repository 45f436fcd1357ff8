"""Scenes: what a picture shows, before it is put into words and drawn. Everything here is decided by a seed."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from lib.default_model import words

MARGIN = 0.03
# Of the combinations of what is shown, one in this many is never trained on: the judge's prompts are drawn from these.
HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class SceneMix:
    """The frequencies of the kinds of scenes, and the least distances of their things."""

    kinds: Mapping[str, float]
    """Weights of the kinds."""
    pair_gap: float
    """The least gap between the two of a pair, in shares of the picture's shorter side."""
    count_gap: float
    """The least gap between things that are counted, which is a quarter of their diameter too."""


# The judge's prompts come from the one, the pictures that are trained on from the other: these have wider gaps and more
# things. Before them, what was wrong in large pictures were most of all things that touched.
JUDGED = SceneMix({"single": 0.22, "placed": 0.15, "pair": 0.43, "count": 0.2}, pair_gap=0.04, count_gap=0.0)
TRAINED = SceneMix({"single": 0.15, "placed": 0.1, "pair": 0.45, "count": 0.3}, pair_gap=0.1, count_gap=0.12)


@dataclass(frozen=True)
class Thing:
    """One shape of a scene. Places and sizes are in shares of the picture's shorter side."""

    shape: str
    color: str
    size: str
    diameter: float
    x: float
    """The centre, from the left edge."""
    y: float
    """The centre, from the upper edge."""
    turn: float
    """Radians, clockwise."""


@dataclass(frozen=True)
class DrawnScene:
    kind: str
    """One of the kinds of a `SceneMix`."""
    things: tuple[Thing, ...]
    background: str
    relation: str | None = None
    """From the first thing of a pair to the second, one of `words.RELATIONS`."""
    position: str | None = None
    """The place of the only thing of a `placed` scene, one of `words.POSITIONS`."""

    @property
    def held_out(self) -> bool:
        """True where no scene with these shapes and colors, this kind and this relation is trained on."""
        parts = [self.kind, str(self.relation), str(self.position), str(len(self.things))]
        parts += [f"{thing.shape} {thing.color}" for thing in self.things]
        return is_held_out(parts)


def is_held_out(parts: Iterable[str]) -> bool:
    """Tell whether a combination of these parts is one of those that are never trained on."""
    return hashlib.sha256("/".join(parts).encode()).digest()[0] % HELD_OUT_ONE_IN == 0


class HoldableScene(Protocol):
    """A scene that may be one of those that are never trained on."""

    @property
    def held_out(self) -> bool: ...


AnyScene = TypeVar("AnyScene", bound=HoldableScene)


def draw_until(attempt: Callable[[], AnyScene | None], held_out: bool) -> AnyScene:
    """Make attempts until one gives a scene, trained on or held out."""
    while True:
        scene = attempt()
        if scene is not None and scene.held_out == held_out:
            return scene


def draw_scene(rng: random.Random, width: int, height: int, held_out: bool = False) -> DrawnScene:
    """Draw a scene for a picture of `width` x `height` pixels, trained on or held out for the judge."""
    shorter, mix = min(width, height), JUDGED if held_out else TRAINED
    return draw_until(lambda: _try_scene(rng, width / shorter, height / shorter, mix), held_out)


def _try_scene(rng: random.Random, width: float, height: float, mix: SceneMix) -> DrawnScene | None:
    kind = rng.choices(list(mix.kinds), list(mix.kinds.values()))[0]
    background = rng.choice(["white", *words.BACKGROUNDS])
    if kind == "pair":
        return _try_pair(rng, width, height, background, mix.pair_gap)
    if kind == "count":
        return _try_count(rng, width, height, background, mix.count_gap)
    size = rng.choice(list(words.SIZES))
    diameter = rng.uniform(*words.SIZES[size])
    position = rng.choice(list(words.POSITIONS)) if kind == "placed" else None
    reach_x, reach_y = width / 2 - diameter / 2 - MARGIN, height / 2 - diameter / 2 - MARGIN
    if position is not None:
        column, row = words.POSITIONS[position]
        x = width / 2 + reach_x * (column * rng.uniform(0.8, 1) if column else rng.uniform(-0.12, 0.12))
        y = height / 2 + reach_y * (row * rng.uniform(0.8, 1) if row else rng.uniform(-0.12, 0.12))
    else:
        x, y = width / 2 + reach_x * rng.uniform(-0.5, 0.5), height / 2 + reach_y * rng.uniform(-0.5, 0.5)
    shape, color = rng.choice(list(words.SHAPES)), pick_color(rng, background)
    return DrawnScene(
        kind, (Thing(shape, color, size, diameter, x, y, pick_turn(rng, shape)),), background, None, position
    )


def _try_pair(rng: random.Random, width: float, height: float, background: str, least_gap: float) -> DrawnScene | None:
    """Two things that differ, one beside the other along the relation and nearly on one line across it."""
    relation = rng.choice(list(words.RELATIONS))
    right, down = words.RELATIONS[relation]
    size_names = [rng.choice(["small", "medium"] if rng.random() < 0.85 else ["large", "small"]) for _ in range(2)]
    diameters = [rng.uniform(*words.SIZES[name]) for name in size_names]
    along, across = (width, height) if right else (height, width)
    free = along - sum(diameters) - 2 * MARGIN
    if free < least_gap + 0.01:
        return None
    gap = rng.uniform(least_gap, min(free, 0.3))
    start = MARGIN + rng.uniform(0, free - gap)
    first, second = (0, 1) if right + down > 0 else (1, 0)
    centres = [0.0, 0.0]
    centres[first] = start + diameters[first] / 2
    centres[second] = start + diameters[first] + gap + diameters[second] / 2
    middle = across / 2 + (across / 2 - max(diameters) / 2 - MARGIN) * rng.uniform(-0.5, 0.5)
    sides = [middle + rng.uniform(-0.04, 0.04) for _ in range(2)]
    shapes = [rng.choice(list(words.SHAPES)) for _ in range(2)]
    colors = [pick_color(rng, background) for _ in range(2)]
    if shapes[0] == shapes[1] and colors[0] == colors[1]:
        return None
    things = tuple(
        Thing(shape, color, size, diameter, *((c, s) if right else (s, c)), pick_turn(rng, shape))
        for shape, color, size, diameter, c, s in zip(
            shapes, colors, size_names, diameters, centres, sides, strict=True
        )
    )
    return DrawnScene("pair", things, background, relation)


def _try_count(rng: random.Random, width: float, height: float, background: str, least_gap: float) -> DrawnScene | None:
    """Two to four equal things that do not touch."""
    number = rng.choice(list(words.NUMBERS))
    size = "medium" if number == 2 and rng.random() < 0.5 else "small"
    shape, color = rng.choice(list(words.SHAPES)), pick_color(rng, background)
    diameter = rng.uniform(*words.SIZES[size])
    places: list[tuple[float, float]] = []
    for _ in range(60):
        reach = diameter / 2 + MARGIN
        place = (rng.uniform(reach, width - reach), rng.uniform(reach, height - reach))
        if all(math.dist(place, other) > diameter + max(0.25 * diameter, least_gap) for other in places):
            places.append(place)
        if len(places) == number:
            things = tuple(Thing(shape, color, size, diameter, x, y, pick_turn(rng, shape)) for x, y in places)
            return DrawnScene("count", things, background)
    return None


def pick_color(rng: random.Random, background: str) -> str:
    behind = words.BACKGROUNDS[background]
    return rng.choice(
        [name for name, rgb in words.COLORS.items() if words.measure_contrast(rgb, behind) > words.MIN_CONTRAST]
    )


def pick_turn(rng: random.Random, shape: str) -> float:
    """Shapes stand upright but for a few degrees: a square on its corner has another name."""
    return 0.0 if shape == "circle" else rng.gauss(0, 0.06)
