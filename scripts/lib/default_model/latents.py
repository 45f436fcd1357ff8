"""Pictures prepared once for the transformer: their latents and the tokens of their captions, in shards by size."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.default_model.architecture import TEXT_TOKENS
from lib.default_model.captions import describe
from lib.default_model.drawing import draw_picture
from lib.default_model.scenes import draw_scene
from lib.default_model.vae_training import load_vae, to_pixels
from lib.training.shards import PixelSize, read_shards, tokenize, write_shards

# Captions of each picture, of which one is drawn whenever the picture is trained on.
WORDINGS = 4
# (width, height): shards of a full data set, and the share of training steps. Each step has pictures of one size.
SIZES = {
    (64, 64): (3, 0.03),
    (96, 96): (6, 0.05),
    (128, 128): (50, 0.18),
    (128, 96): (3, 0.04),
    (96, 128): (3, 0.04),
    (192, 128): (3, 0.05),
    (128, 192): (3, 0.05),
    (192, 192): (6, 0.10),
    (256, 192): (3, 0.06),
    (192, 256): (3, 0.06),
    (256, 256): (20, 0.44),
}
# Only those of at most so many pixels in the first part of the training: they cost a third and teach most of it.
SMALL_PIXELS = 128 * 128


@dataclass(frozen=True)
class PreparedPictures:
    """Prepared pictures of one size."""

    latents: torch.Tensor
    """(n, channels, height / 8, width / 8), float16, as the VAE encodes them and before they are scaled."""
    clip_ids: torch.Tensor
    """(n, WORDINGS, TEXT_TOKENS), 16-bit."""
    t5_ids: torch.Tensor
    """(n, WORDINGS, TEXT_TOKENS), 16-bit."""


def prepare_latents(
    folder: Path, seed: int, scale: float, pictures: int, tokenizers: tuple[Any, Any], device: torch.device
) -> None:
    """Write the shards that are missing, of so many `pictures` each, as `write_shards` does. The VAE encodes them on
    the device."""
    vae = load_vae(folder).to(device)
    numbers = {size: number for size, (number, _) in SIZES.items()}
    write_shards(folder, seed, scale, numbers, lambda rng, size: _prepare_shard(vae, rng, size, pictures, tokenizers))


def load_pictures(folder: Path) -> dict[PixelSize, PreparedPictures]:
    """All shards that were prepared, by size."""
    return {size: PreparedPictures(**tensors) for size, tensors in read_shards(folder, SIZES).items()}


@torch.no_grad()
def _prepare_shard(
    vae: Any, rng: random.Random, size: PixelSize, pictures: int, tokenizers: tuple[Any, Any]
) -> dict[str, torch.Tensor]:
    width, height = size
    latents, captions = [], []
    batch = max(1, 2**19 // (width * height))
    for start in range(0, pictures, batch):
        scenes = [draw_scene(rng, width, height) for _ in range(min(batch, pictures - start))]
        pixels = to_pixels(np.stack([draw_picture(scene, width, height) for scene in scenes]))
        encoded = vae.encode(pixels.to(vae.device, memory_format=torch.channels_last)).latent_dist.mean
        latents.append(encoded.contiguous().half().cpu())
        captions += [describe(scene, rng) for scene in scenes for _ in range(WORDINGS)]
    clip_ids, t5_ids = (
        tokenize(tokenizer, captions, TEXT_TOKENS).short().view(-1, WORDINGS, TEXT_TOKENS) for tokenizer in tokenizers
    )
    return {"latents": torch.cat(latents), "clip_ids": clip_ids, "t5_ids": t5_ids}
