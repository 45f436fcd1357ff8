"""Training of the image VAE on crops of drawn pictures."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.default_model.architecture import build_vae
from lib.default_model.drawing import draw_picture
from lib.default_model.scenes import DrawnScene, draw_scene
from lib.training.autoencoder import load_autoencoder, spread_channels_last, train_autoencoder

_CROP = 64
_BATCH = 16


def train_vae(folder: Path, seed: int, steps: int, device: torch.device) -> None:
    """Train up to `steps` in all. What is learned lies in `folder/vae.pt`, figures in `folder/vae.jsonl`."""
    train_autoencoder(
        folder,
        lambda: spread_channels_last(build_vae()),
        lambda rng: to_pixels(draw_crop(rng)[None])[0],
        seed,
        steps,
        _BATCH,
        device,
    )


def load_vae(folder: Path) -> Any:
    """The averaged VAE of a run, ready to encode and decode."""
    return load_autoencoder(folder, build_vae())


def draw_crop(rng: random.Random) -> np.ndarray:
    """A part of a picture of one of several sizes, 64 x 64 pixels of it, most often around a shape."""
    side = rng.choice([64, 96, 128, 128, 192, 256])
    scene = draw_scene(rng, side, side)
    return _crop(draw_picture(scene, side, side), scene, rng)


def _crop(picture: np.ndarray, scene: DrawnScene, rng: random.Random) -> np.ndarray:
    side = len(picture)
    thing = rng.choice(scene.things)
    reach = thing.diameter * side / 2
    left, top = (
        min(max(round(centre * side + rng.uniform(-reach, reach)) - _CROP // 2, 0), side - _CROP)
        for centre in (thing.x, thing.y)
    )
    return picture[top : top + _CROP, left : left + _CROP]


def to_pixels(pictures: np.ndarray) -> torch.Tensor:
    """8-bit pictures (n, height, width, 3) as the VAE takes them: (n, 3, height, width) from -1 to 1."""
    return torch.tensor(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
