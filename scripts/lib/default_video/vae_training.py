"""Training of the video VAE on crops of drawn clips."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.default_video.architecture import build_vae
from lib.default_video.clips import FRAMES, draw_clip
from lib.default_video.motion import draw_motion
from lib.training.autoencoder import load_autoencoder, train_autoencoder

_CROP, _CROP_FRAMES = 32, 9
_BATCH = 16


def train_vae(folder: Path, seed: int, steps: int, device: torch.device) -> None:
    """Train up to `steps` in all. What is learned lies in `folder/vae.pt`, figures in `folder/vae.jsonl`."""
    train_autoencoder(folder, build_vae, lambda rng: to_pixels(draw_crop(rng)[None])[0], seed, steps, _BATCH, device)


def load_vae(folder: Path) -> Any:
    """The averaged VAE of a run, ready to encode and decode."""
    return load_autoencoder(folder, build_vae())


def draw_crop(rng: random.Random) -> np.ndarray:
    """A part of a clip of one of several sizes, most often with the edge of a thing in it: 8-bit RGB of shape (9, 32,
    32, 3)."""
    side = rng.choice([64, 96, 96, 128])
    scene = draw_motion(rng, side, side)
    first = rng.randint(0, FRAMES - _CROP_FRAMES)
    clip = draw_clip(scene, side, side, range(first, first + _CROP_FRAMES))
    part = rng.choice(scene.things)
    thing = part.move((first + rng.uniform(0, _CROP_FRAMES)) / (FRAMES - 1))
    reach = thing.diameter * side / 2
    left, top = (
        min(max(round(centre * side + rng.uniform(-reach, reach)) - _CROP // 2, 0), side - _CROP)
        for centre in (thing.x, thing.y)
    )
    return clip[:, top : top + _CROP, left : left + _CROP]


def to_pixels(clips: np.ndarray) -> torch.Tensor:
    """8-bit clips (n, frames, height, width, 3) as the VAE takes them: (n, 3, frames, height, width) from -1 to 1."""
    return torch.tensor(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
