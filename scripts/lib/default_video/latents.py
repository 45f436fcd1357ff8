"""Clips prepared once for the transformer: their latents and the tokens of their captions, in shards by size."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.default_video.architecture import TEXT_TOKENS
from lib.default_video.clips import describe_motion, draw_clip
from lib.default_video.motion import draw_motion
from lib.default_video.vae_training import load_vae, to_pixels
from lib.training.shards import PixelSize, read_shards, tokenize, write_shards

# Captions of each clip, of which one is drawn whenever the clip is trained on.
CLIP_WORDINGS = 4
# (width, height): shards of a full data set.
CLIP_SIZES = {(64, 64): 40, (96, 96): 40}


@dataclass(frozen=True)
class PreparedClips:
    """Prepared clips of one size."""

    latents: torch.Tensor
    """(n, channels, latent frames, height / 8, width / 8), float16, as the VAE encodes them, before they are scaled."""
    ids: torch.Tensor
    """(n, CLIP_WORDINGS, TEXT_TOKENS), 16-bit."""


def prepare_clips(folder: Path, seed: int, scale: float, clips: int, tokenizer: Any, device: torch.device) -> None:
    """Write the shards that are missing, of so many `clips` each, as `write_shards` does. The VAE encodes them on the
    device."""
    vae = load_vae(folder).to(device)
    write_shards(folder, seed, scale, CLIP_SIZES, lambda rng, size: _prepare_shard(vae, rng, size, clips, tokenizer))


def load_clips(folder: Path) -> dict[PixelSize, PreparedClips]:
    """All shards that were prepared, by size."""
    return {size: PreparedClips(**tensors) for size, tensors in read_shards(folder, CLIP_SIZES).items()}


@torch.no_grad()
def _prepare_shard(
    vae: Any, rng: random.Random, size: PixelSize, clips: int, tokenizer: Any
) -> dict[str, torch.Tensor]:
    width, height = size
    latents, captions = [], []
    for start in range(0, clips, 8):
        scenes = [draw_motion(rng, width, height) for _ in range(min(8, clips - start))]
        pixels = to_pixels(np.stack([draw_clip(scene, width, height) for scene in scenes]))
        encoded = vae.encode(pixels.to(vae.device, memory_format=torch.channels_last_3d)).latent_dist.mean
        latents.append(encoded.contiguous().half().cpu())
        captions += [describe_motion(scene, rng) for scene in scenes for _ in range(CLIP_WORDINGS)]
    ids = tokenize(tokenizer, captions, TEXT_TOKENS).short().view(-1, CLIP_WORDINGS, TEXT_TOKENS)
    return {"latents": torch.cat(latents), "ids": ids}
