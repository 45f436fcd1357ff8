"""Data prepared once for a transformer: latents and the tokens of their captions, in files (shards) by size."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from lib.training.seeds import derive_seed

PixelSize = tuple[int, int]
"""Width and height in pixels."""


def write_shards(
    folder: Path,
    seed: int,
    scale: float,
    numbers: Mapping[PixelSize, int],
    prepare: Callable[[random.Random, PixelSize], dict[str, torch.Tensor]],
) -> None:
    """Write the shards that are missing in `folder/latents`, each as `prepare` makes it. `numbers` has those of a full
    data set by size; `scale` multiplies them (at least one each)."""
    (folder / "latents").mkdir(parents=True, exist_ok=True)
    wanted = [
        (folder / "latents" / f"{size[0]}x{size[1]}-{index}.safetensors", size)
        for size, number in numbers.items()
        for index in range(max(1, round(number * scale)))
    ]
    for path, size in tqdm([entry for entry in wanted if not entry[0].exists()], desc="latents"):
        save_file(prepare(random.Random(derive_seed(seed, path.stem)), size), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)


def read_shards(folder: Path, sizes: Iterable[PixelSize]) -> dict[PixelSize, dict[str, torch.Tensor]]:
    """The tensors of all shards of each size, one after the other, by their names."""
    read = {}
    for width, height in sizes:
        paths = sorted((folder / "latents").glob(f"{width}x{height}-*.safetensors"), key=lambda path: path.name)
        shards = [load_file(path) for path in paths]
        read[width, height] = {key: torch.cat([shard[key] for shard in shards]) for key in shards[0]}
    return read


def tokenize(tokenizer: Any, captions: list[str], tokens: int) -> torch.Tensor:
    """The tokens of captions, filled up or cut off: (n, tokens)."""
    ids: torch.Tensor = tokenizer(
        captions, padding="max_length", max_length=tokens, truncation=True, return_tensors="pt"
    ).input_ids
    return ids
