"""A model folder of SDXL whose U-Net has the levels of the published one at a fraction of its width."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import torch

from tridentserve.models.cache import cache_dir
from tridentserve.pipelines.tiny.build import ensure_tiny

# Of the published model: 320, 640 and 1,280 channels, with 0, 2 and 10 transformer blocks on each level.
_LEVELS: dict[str, Any] = {
    "block_out_channels": (64, 128, 256),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (1, 2, 4),
    "norm_num_groups": 32,
}


def make_small_sdxl(folder: Path) -> Path:
    """The tiny SDXL with such a U-Net of random weights, in `folder`."""
    shutil.copytree(ensure_tiny("sdxl", cache_dir()), folder)
    target = folder / "unet"
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    config = {name: value for name, value in config.items() if not name.startswith("_")}
    shutil.rmtree(target)
    torch.manual_seed(0)
    diffusers.UNet2DConditionModel(**config | _LEVELS).save_pretrained(target)
    return folder
