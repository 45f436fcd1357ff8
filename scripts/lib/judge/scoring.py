"""Comparison of what was read from a picture with the scene that was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from lib.default_model import words
from lib.default_model.scenes import DrawnScene
from lib.judge.motion_scoring import MotionScore
from lib.judge.reading import Reading, ReadThing


@dataclass(frozen=True)
class Score:
    """Shares of what was asked for that the picture shows; None where the prompt does not ask for it."""

    color: float
    """The share of the things asked for that are there in their color."""
    shape: float
    """The share of the things asked for that are there in their shape."""
    count: float
    """1 where the picture has as many things as were asked for."""
    background: float
    relation: float | None
    """1 where the second thing lies where the relation says, as seen from the first."""


def score_picture(scene: DrawnScene, reading: Reading) -> Score:
    """Compare. Each thing asked for is taken to be the one found that fits best; two are never the same one."""
    pairs = _match(scene, reading.things)
    relation = None
    if scene.relation is not None:
        first, second = pairs
        relation = float(first is not None and second is not None and holds(scene.relation, first, second))
    asked = len(scene.things)
    matched = [(thing, found) for thing, found in zip(scene.things, pairs, strict=True) if found is not None]
    return Score(
        color=sum(found.color == thing.color for thing, found in matched) / asked,
        shape=sum(found.shape == thing.shape for thing, found in matched) / asked,
        count=float(len(reading.things) == asked),
        background=float(reading.background == scene.background),
        relation=relation,
    )


def holds(relation: str, first: ReadThing, second: ReadThing) -> bool:
    """Tell whether the first thing lies above (below, left of, right of) the second: more so than to its side."""
    along, across = first.measure_way(second, words.RELATIONS[relation])
    return along > abs(across)


def _match(scene: DrawnScene, found: Sequence[ReadThing]) -> list[ReadThing | None]:
    """The found thing for each one asked for, so that most colors and shapes agree. All ways are tried."""
    candidates: list[ReadThing | None] = [*found[:6], *[None] * len(scene.things)]

    def agree(order: Iterable[ReadThing | None]) -> int:
        return sum(
            2 * (entry.color == thing.color) + (entry.shape == thing.shape)
            for thing, entry in zip(scene.things, order, strict=True)
            if entry is not None
        )

    return list(max(itertools.permutations(candidates, len(scene.things)), key=agree))


def average(scores: Sequence[Score | MotionScore]) -> dict[str, float]:
    """The mean of each figure over the pictures or clips that were asked for it."""
    figures = {}
    for name in (field.name for field in fields(scores[0])):
        values = [value for score in scores if (value := getattr(score, name)) is not None]
        if values:
            figures[name] = sum(values) / len(values)
    return figures
