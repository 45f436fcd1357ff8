"""A model folder of random weights that are large enough for its loads to be measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import torch

from tridentserve.models.cache import cache_dir
from tridentserve.pipelines.tiny.build import ensure_tiny

# About 40 MB of float32 per layer.
_HEADS, _HEAD_DIM = 8, 64


def make_model_folder(folder: Path, layers: int) -> Path:
    """The tiny SD3 with a transformer of `layers` layers of 512 channels, in `folder`."""
    shutil.copytree(ensure_tiny("sd3", cache_dir()), folder)
    target = folder / "transformer"
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    config = {name: value for name, value in config.items() if not name.startswith("_")}
    config |= {"num_layers": layers, "num_attention_heads": _HEADS, "attention_head_dim": _HEAD_DIM}
    config["caption_projection_dim"] = _HEADS * _HEAD_DIM
    torch.manual_seed(0)
    shutil.rmtree(target)
    diffusers.SD3Transformer2DModel(**config).save_pretrained(target)
    return folder
