"""The words that the default model knows: shapes, colors, sizes, relations, positions and backgrounds."""

from __future__ import annotations

# Each shape has one name of its own, first, and others that captions use now and then.
SHAPES = {
    "circle": ("circle", "disc"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
    "heart": ("heart",),
    "cross": ("cross", "plus"),
}
# 8-bit RGB. Colors of shapes lie far from each other, so that a reader can tell which one a picture shows.
COLORS = {
    "red": (220, 30, 35),
    "orange": (250, 140, 15),
    "yellow": (250, 220, 30),
    "green": (35, 160, 60),
    "blue": (35, 80, 215),
    "purple": (130, 45, 170),
    "pink": (250, 130, 185),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
}
BACKGROUNDS = {
    "white": (250, 250, 250),
    "gray": (140, 140, 140),
    "black": (15, 15, 15),
    "beige": (235, 220, 190),
    "light blue": (175, 215, 245),
    "dark green": (15, 65, 40),
}
# Diameters as shares of the shorter side of the picture.
SIZES = {"small": (0.18, 0.24), "medium": (0.30, 0.37), "large": (0.44, 0.54)}
# From the first object to the second, in shares of the way (right, down).
RELATIONS = {"above": (0, 1), "below": (0, -1), "left of": (1, 0), "right of": (-1, 0)}
RELATION_WORDINGS = {
    "above": ("above", "over"),
    "below": ("below", "under", "beneath"),
    "left of": ("to the left of", "left of"),
    "right of": ("to the right of", "right of"),
}
# Where the centre of a single object lies: (column, row), from -1 (left, top) to 1.
POSITIONS = {
    "in the middle": (0, 0),
    "at the top": (0, -1),
    "at the bottom": (0, 1),
    "on the left": (-1, 0),
    "on the right": (1, 0),
    "in the top left corner": (-1, -1),
    "in the top right corner": (1, -1),
    "in the bottom left corner": (-1, 1),
    "in the bottom right corner": (1, 1),
}
NUMBERS = {2: "two", 3: "three", 4: "four"}
# Two colors nearer than this (Euclidean distance in RGB) do not meet as a shape and its background.
MIN_CONTRAST = 110.0


def plural(noun: str) -> str:
    """The plural of the name of a shape."""
    return f"{noun}es" if noun.endswith(("x", "s")) else f"{noun}s"


def measure_contrast(first: tuple[int, int, int], second: tuple[int, int, int]) -> float:
    """The Euclidean distance of two 8-bit RGB colors."""
    return float(sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5)
