"""Reading a picture back: its background, and the color, shape and place of each thing in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy import ndimage

from lib.default_model import words
from lib.default_model.drawing import draw_picture
from lib.default_model.scenes import DrawnScene, Thing

# A pixel further than this from the background (Euclidean, 8-bit RGB) belongs to a thing.
_MIN_DISTANCE = 55.0
# Smaller spots are flaws of the picture and not things; of the picture's shorter side, squared.
_MIN_AREA = 0.006
# The overlap (intersection over union) with the nearest outline, below which a shape has no name.
_MIN_OVERLAP = 0.72
# A thing has one color: at least this share of its pixels lies this near its median color. Noise has no things.
_MIN_UNIFORM, _MAX_SPREAD = 0.75, 70.0
_GRID = 48
_TURNS = (-0.2, -0.1, 0.0, 0.1, 0.2)


@dataclass(frozen=True)
class ReadThing:
    """One thing that was read from a picture."""

    color: str
    shape: str
    """One of `words.SHAPES`, or `unknown`."""
    overlap: float
    """With the outline of that shape, 1 at most."""
    x: float
    """The centre, in shares of the shorter side, from the left edge."""
    y: float
    """The centre, in shares of the shorter side, from the upper edge."""
    area: float
    """In shares of the shorter side, squared."""

    def measure_way(self, other: ReadThing, direction: tuple[int, int]) -> tuple[float, float]:
        """The distances at which another thing lies from this one along a direction (right, down) and across it."""
        right, down = direction
        x, y = other.x - self.x, other.y - self.y
        return (x * right, y) if right else (y * down, x)


@dataclass(frozen=True)
class Reading:
    background: str
    things: tuple[ReadThing, ...]
    """Largest first."""


def read_picture(picture: np.ndarray) -> Reading:
    """Read a picture of shape (height, width, 3), 8-bit RGB."""
    pixels = picture.astype(np.float32)
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    behind = np.median(edge, 0)
    mask = np.linalg.norm(pixels - behind, axis=-1) > _MIN_DISTANCE
    mask = ndimage.binary_opening(mask) if min(mask.shape) > 96 else mask
    labels, number = ndimage.label(mask)
    side = min(mask.shape)
    found = []
    for index in range(1, number + 1):
        part = labels == index
        if part.sum() < _MIN_AREA * side**2:
            continue
        thing = _read_thing(pixels, ndimage.binary_fill_holes(part), side)
        if thing is not None:
            found.append(thing)
    things = sorted(found, key=lambda thing: -thing.area)
    return Reading(_find_nearest(behind, words.BACKGROUNDS), tuple(things))


def _read_thing(pixels: np.ndarray, part: np.ndarray, side: int) -> ReadThing | None:
    inner = ndimage.binary_erosion(part, iterations=2)
    colors = pixels[inner if inner.any() else part]
    color = np.median(colors, 0)
    if (np.linalg.norm(colors - color, axis=-1) < _MAX_SPREAD).mean() < _MIN_UNIFORM:
        return None
    row, column = ndimage.center_of_mass(part)
    shape, overlap = _name_shape(part)
    return ReadThing(
        color=_find_nearest(color, words.COLORS),
        shape=shape if overlap >= _MIN_OVERLAP else "unknown",
        overlap=overlap,
        x=(column + 0.5) / side,
        y=(row + 0.5) / side,
        area=part.sum() / side**2,
    )


def _find_nearest(color: np.ndarray, names: dict[str, tuple[int, int, int]]) -> str:
    return min(names, key=lambda name: float(np.linalg.norm(color - np.array(names[name]))))


def _name_shape(part: np.ndarray) -> tuple[str, float]:
    normal = _normalize(part)
    overlaps = {
        shape: max(float((normal & mask).sum() / (normal | mask).sum()) for mask in masks)
        for shape, masks in _outline_masks().items()
    }
    best = max(overlaps, key=lambda shape: overlaps[shape])
    return best, overlaps[best]


def _normalize(part: np.ndarray) -> np.ndarray:
    """Cut out the thing, scale both sides by one factor, and put its centre of mass into the middle of a grid."""
    rows, columns = np.nonzero(part)
    row, column = rows.mean(), columns.mean()
    # The radius of inertia is the same for a shape however it is turned.
    scale = np.sqrt(((rows - row) ** 2 + (columns - column) ** 2).mean()) / (_GRID * 0.22)
    steps = (np.arange(_GRID) - _GRID / 2 + 0.5) * scale
    grid = np.meshgrid(steps + row, steps + column, indexing="ij")
    return np.asarray(ndimage.map_coordinates(part.astype(np.float32), grid, order=1) > 0.5)


@cache
def _outline_masks() -> dict[str, list[np.ndarray]]:
    """Each shape as it is drawn, at several turns."""
    masks = {}
    for shape in words.SHAPES:
        thing = Thing(shape, "black", "large", 0.6, 0.5, 0.5, 0.0)
        turned = [DrawnScene("single", (replace(thing, turn=turn),), "white") for turn in _TURNS]
        masks[shape] = [_normalize(draw_picture(scene, 128, 128)[..., 0] < 128) for scene in turned]
    return masks
