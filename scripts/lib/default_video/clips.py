"""Clips of moving scenes, drawn frame by frame, and their captions."""

from __future__ import annotations

import random

import numpy as np

from lib.default_model.captions import describe_background, name_thing
from lib.default_model.drawing import draw_picture
from lib.default_video.motion import DIRECTION_WORDINGS, MovingScene

FRAMES = 17
"""Frames of a clip: one, and four for each further latent frame."""
FPS = 8


def draw_clip(scene: MovingScene, width: int, height: int, frames: range = range(FRAMES)) -> np.ndarray:
    """Draw frames of a clip of `FRAMES`. Returns 8-bit RGB of shape (frames, height, width, 3)."""
    return np.stack([draw_picture(scene.freeze(index / (FRAMES - 1)), width, height) for index in frames])


def describe_motion(scene: MovingScene, rng: random.Random) -> str:
    """Put a moving scene into words. Sizes and the background are left out now and then, as people do."""
    # Two with their sizes would have more words than the encoder reads.
    names_size = scene.kind == "one" and rng.random() < 0.4
    parts = [
        f"{name_thing(part.thing, rng, names_size)} {rng.choice(DIRECTION_WORDINGS[part.direction])}"
        for part in scene.things
    ]
    return " and ".join(parts) + describe_background(scene.background, rng)


def describe_motion_plainly(scene: MovingScene) -> str:
    """The one caption of a moving scene that the judge asks for: all that it scores, in plain words."""
    parts = []
    for part in scene.things:
        color, shape = part.thing.color, part.thing.shape
        article = "an" if color[0] in "aeiou" else "a"
        parts.append(f"{article} {color} {shape} {DIRECTION_WORDINGS[part.direction][0]}")
    return f"{' and '.join(parts)} on a {scene.background} background"
