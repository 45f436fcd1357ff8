"""Clips prepared once for the transformer: their latents and the tokens of their captions, in shards by size."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from lib.default_video.architecture import TEXT_TOKENS
from lib.default_video.clips import describe_motion, draw_clip
from lib.default_video.motion import draw_motion
from lib.default_video.vae_training import load_vae, to_pixels
from lib.training.seeds import derive_seed

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


def prepare_clips(folder: Path, seed: int, scale: float, clips: int, tokenizer: Any) -> None:
    """Write the shards that are missing, of so many `clips` each. `scale` multiplies the number of shards of each
    size (at least one each)."""
    vae = load_vae(folder)
    wanted = [
        (folder / "latents" / f"{width}x{height}-{index}.safetensors", width, height)
        for (width, height), shards in CLIP_SIZES.items()
        for index in range(max(1, round(shards * scale)))
    ]
    (folder / "latents").mkdir(parents=True, exist_ok=True)
    for path, width, height in tqdm([entry for entry in wanted if not entry[0].exists()], desc="latents"):
        rng = random.Random(derive_seed(seed, path.stem))
        shard = _prepare_shard(vae, rng, (width, height), clips, tokenizer)
        save_file(shard, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)


def load_clips(folder: Path) -> dict[tuple[int, int], PreparedClips]:
    """All shards that were prepared, by size."""
    prepared = {}
    for width, height in CLIP_SIZES:
        paths = sorted((folder / "latents").glob(f"{width}x{height}-*.safetensors"), key=lambda path: path.name)
        shards = [load_file(path) for path in paths]
        prepared[width, height] = PreparedClips(
            *(torch.cat([shard[key] for shard in shards]) for key in ("latents", "ids"))
        )
    return prepared


@torch.no_grad()
def _prepare_shard(
    vae: Any, rng: random.Random, size: tuple[int, int], clips: int, tokenizer: Any
) -> dict[str, torch.Tensor]:
    width, height = size
    latents, captions = [], []
    for start in range(0, clips, 8):
        scenes = [draw_motion(rng, width, height) for _ in range(min(8, clips - start))]
        pixels = to_pixels(np.stack([draw_clip(scene, width, height) for scene in scenes]))
        encoded = vae.encode(pixels.to(memory_format=torch.channels_last_3d)).latent_dist.mean
        latents.append(encoded.contiguous().half())
        captions += [describe_motion(scene, rng) for scene in scenes for _ in range(CLIP_WORDINGS)]
    ids = tokenize_motion(tokenizer, captions).short().view(-1, CLIP_WORDINGS, TEXT_TOKENS)
    return {"latents": torch.cat(latents), "ids": ids}


def tokenize_motion(tokenizer: Any, captions: list[str]) -> torch.Tensor:
    """The tokens of captions, (n, TEXT_TOKENS): the pipeline's without most of the filling."""
    ids: torch.Tensor = tokenizer(
        captions, padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    return ids
