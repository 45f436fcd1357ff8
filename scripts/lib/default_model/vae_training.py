"""Training of the image VAE on crops of drawn pictures."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from lib.default_model.architecture import build_vae, derive_seed
from lib.default_model.drawing import draw_picture
from lib.default_model.scenes import DrawnScene, draw_scene
from lib.training.runs import TrainingRun, plan_rate

_CROP = 64
_BATCH = 16
_PEAK_RATE = 3e-3
_KL_WEIGHT = 3e-4


def train_vae(folder: Path, seed: int, steps: int) -> None:
    """Train up to `steps` in all. What is learned lies in `folder/vae.pt`, figures in `folder/vae.jsonl`."""
    torch.manual_seed(derive_seed(seed, "vae"))
    vae = build_vae().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=_PEAK_RATE, weight_decay=1e-4, betas=(0.9, 0.99))
    run = TrainingRun(folder, "vae", {"vae": vae}, [optimizer])
    for step in run.iterate(steps):
        rng = random.Random(derive_seed(seed, "crops", step))
        torch.manual_seed(derive_seed(seed, "noise", step))
        crops = np.stack([draw_crop(rng) for _ in range(_BATCH)])
        pixels = to_pixels(crops).to(memory_format=torch.channels_last)
        posterior = vae.encode(pixels).latent_dist
        decoded = vae.decode(posterior.sample()).sample
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        l1, l2 = functional.l1_loss(decoded, pixels), functional.mse_loss(decoded, pixels)
        run.learn(l1 + l2 + _KL_WEIGHT * kl, plan_rate(step, steps, _PEAK_RATE))
        run.average(0.998)
        if step % 20 == 0:
            run.log(l1=l1.item(), l2=l2.item(), kl=kl.item())


def load_vae(folder: Path) -> Any:
    """The averaged VAE of a run, ready to encode and decode."""
    vae = build_vae()
    state = torch.load(folder / "vae.pt", map_location="cpu", weights_only=True)
    vae.load_state_dict(state["averages"]["vae"])
    return vae.eval().requires_grad_(False)


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
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
