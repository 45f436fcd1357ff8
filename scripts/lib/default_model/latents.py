"""Pictures prepared once for the transformer: their latents and the tokens of their captions, in shards by size."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from lib.default_model.architecture import TEXT_TOKENS
from lib.default_model.captions import describe
from lib.default_model.drawing import draw_picture
from lib.default_model.scenes import draw_scene
from lib.default_model.vae_training import load_vae, to_pixels
from lib.training.seeds import derive_seed

# Captions of each picture, of which one is drawn whenever the picture is trained on.
WORDINGS = 4
# (width, height): shards of a full data set, and the share of training steps. Each step has pictures of one size.
SIZES = {
    (64, 64): (3, 0.03),
    (96, 96): (6, 0.05),
    (128, 128): (50, 0.27),
    (128, 96): (3, 0.04),
    (96, 128): (3, 0.04),
    (192, 128): (3, 0.05),
    (128, 192): (3, 0.05),
    (192, 192): (6, 0.12),
    (256, 192): (3, 0.06),
    (192, 256): (3, 0.06),
    (256, 256): (10, 0.23),
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


def prepare_latents(folder: Path, seed: int, scale: float, pictures: int, tokenizers: tuple[Any, Any]) -> None:
    """Write the shards that are missing, of so many `pictures` each. `scale` multiplies the number of shards of each
    size (at least one each)."""
    vae = load_vae(folder)
    wanted = [
        (folder / "latents" / f"{width}x{height}-{index}.safetensors", width, height)
        for (width, height), (shards, _) in SIZES.items()
        for index in range(max(1, round(shards * scale)))
    ]
    (folder / "latents").mkdir(parents=True, exist_ok=True)
    for path, width, height in tqdm([entry for entry in wanted if not entry[0].exists()], desc="latents"):
        rng = random.Random(derive_seed(seed, path.stem))
        shard = _prepare_shard(vae, rng, (width, height), pictures, tokenizers)
        save_file(shard, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)


def load_pictures(folder: Path) -> dict[tuple[int, int], PreparedPictures]:
    """All shards that were prepared, by size."""
    prepared = {}
    for width, height in SIZES:
        paths = sorted((folder / "latents").glob(f"{width}x{height}-*.safetensors"), key=lambda path: path.name)
        shards = [load_file(path) for path in paths]
        prepared[width, height] = PreparedPictures(
            *(torch.cat([shard[key] for shard in shards]) for key in ("latents", "clip_ids", "t5_ids"))
        )
    return prepared


@torch.no_grad()
def _prepare_shard(
    vae: Any, rng: random.Random, size: tuple[int, int], pictures: int, tokenizers: tuple[Any, Any]
) -> dict[str, torch.Tensor]:
    width, height = size
    latents, captions = [], []
    batch = max(1, 2**19 // (width * height))
    for start in range(0, pictures, batch):
        scenes = [draw_scene(rng, width, height) for _ in range(min(batch, pictures - start))]
        pixels = to_pixels(np.stack([draw_picture(scene, width, height) for scene in scenes]))
        encoded = vae.encode(pixels.to(memory_format=torch.channels_last)).latent_dist.mean
        latents.append(encoded.contiguous().half())
        captions += [describe(scene, rng) for scene in scenes for _ in range(WORDINGS)]
    clip_ids, t5_ids = (
        tokenize(tokenizer, captions).short().view(-1, WORDINGS, TEXT_TOKENS) for tokenizer in tokenizers
    )
    return {"latents": torch.cat(latents), "clip_ids": clip_ids, "t5_ids": t5_ids}


def tokenize(tokenizer: Any, captions: list[str]) -> torch.Tensor:
    """The tokens of captions, as the pipeline makes them: (n, TEXT_TOKENS)."""
    ids: torch.Tensor = tokenizer(
        captions, padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    return ids
