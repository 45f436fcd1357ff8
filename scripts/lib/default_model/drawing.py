"""Scenes as pictures, drawn with Pillow at four times the size and shrunk, so that edges are smooth."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw

from lib.default_model import words
from lib.default_model.scenes import DrawnScene, Thing

_OVERSAMPLING = 4


def draw_picture(scene: DrawnScene, width: int, height: int) -> np.ndarray:
    """Draw a scene. Returns 8-bit RGB of shape (height, width, 3)."""
    unit = min(width, height) * _OVERSAMPLING
    canvas = Image.new("RGB", (width * _OVERSAMPLING, height * _OVERSAMPLING), words.BACKGROUNDS[scene.background])
    draw = ImageDraw.Draw(canvas)
    for thing in scene.things:
        draw.polygon([(x * unit, y * unit) for x, y in outline(thing)], fill=words.COLORS[thing.color])
    return np.asarray(canvas.resize((width, height), Image.Resampling.BOX))


def outline(thing: Thing) -> list[tuple[float, float]]:
    """The corners of a thing, in shares of the picture's shorter side."""
    cos, sin = math.cos(thing.turn), math.sin(thing.turn)
    radius = thing.diameter / 2
    return [
        (thing.x + radius * (x * cos - y * sin), thing.y + radius * (x * sin + y * cos))
        for x, y in _OUTLINES[thing.shape]
    ]


def _on_circle(number: int, start: float, radius: float = 1.0) -> list[tuple[float, float]]:
    angles = [start + 2 * math.pi * index / number for index in range(number)]
    return [(radius * math.cos(angle), radius * math.sin(angle)) for angle in angles]


def _outline_star() -> list[tuple[float, float]]:
    tips, notches = _on_circle(5, -math.pi / 2), _on_circle(5, -math.pi / 2 + math.pi / 5, 0.42)
    return [point for pair in zip(tips, notches, strict=True) for point in pair]


def _outline_heart() -> list[tuple[float, float]]:
    times = [2 * math.pi * index / 72 for index in range(72)]
    return [
        (
            math.sin(t) ** 3,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16 - 0.1,
        )
        for t in times
    ]


def _outline_cross(arm: float = 0.33) -> list[tuple[float, float]]:
    corner = [(arm, -1.0), (arm, -arm), (1.0, -arm)]
    points = []
    for _ in range(4):
        points += corner
        corner = [(-y, x) for x, y in corner]
    return points


# Unit outlines: each lies within the circle of radius 1 around the origin, or nearly; y grows downwards.
_OUTLINES = {
    "circle": _on_circle(72, 0),
    "square": [(-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)],
    "triangle": [(0.0, -0.95), (1.0, 0.8), (-1.0, 0.8)],
    "star": _outline_star(),
    "heart": _outline_heart(),
    "cross": _outline_cross(),
}
