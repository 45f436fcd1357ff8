"""The choices of when a denoising step need not be computed whole. Configurations use this module, so it does not
import torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from tridentserve.models.family import Family
from tridentserve.models.model_folder import detect_family, read_json
from tridentserve.models.number_formats import ELEMENT_BYTES, NumberFormat, find_computing_format
from tridentserve.options import options
from tridentserve.requests import GenerationInputs, Quality

# The time of a step relative to one that is computed whole, until requests of the quality have been observed.
# Simulations take it for the truth.
EXPECTED_SHARES: dict[Quality, float] = {"exact": 1.0, "high": 0.75, "fast": 0.5}

# The limits for patches of a U-Net, in those of whole steps: a stack of blocks that takes over a patch changes less of
# the result than all blocks that take over all of it.
_PATCH_FACTOR = 2.0

# While a step runs: what is kept, those of all requests together, the new ones, and the same gathered.
_COPIES = 4


@options
class StepCache:
    """The limits of change up to which a step takes over what the last computed step found, per `quality`."""

    high: float = Field(
        default=0.05,
        ge=0,
        description="Limit for requests of `quality: high`: the mean change of what the first block adds, relative to "
        "the last step that was computed whole; of `sdxl` half the predicted change of what blocks add to a patch.",
    )
    fast: float = Field(
        default=0.12,
        ge=0,
        description="Limit for requests of `quality: fast`. A larger limit skips more and changes the result more.",
    )

    max_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="Most bytes that a request of `sdxl` keeps from step to step for `quality: high` and `fast`, and "
        "takes along where it moves; one that would need more is computed whole. The published model in float16 keeps "
        "0.5 GB for an image of 1024x1024 with guidance.",
    )

    def find_limit(self, quality: Quality) -> float:
        """The limit of a quality; 0, which skips nothing, for `exact`."""
        match quality:
            case "exact":
                return 0.0
            case "high":
                return self.high
            case "fast":
                return self.fast

    def find_patch_limit(self, quality: Quality) -> float:
        """The limit of a quality for patches of a U-Net, of the predicted change of what a stack of blocks adds."""
        return _PATCH_FACTOR * self.find_limit(quality)


def count_cache_bytes(
    model_folder: Path,
    requests: Iterable[GenerationInputs],
    formats: Mapping[str, NumberFormat],
    limits: StepCache,
) -> int:
    """Bytes that the caches of requests need on a device, beside what denoising needs anyway. `formats` are the number
    formats of the model's components, `limits` are the model's. Raises `ModelFolderError` for a folder that is
    damaged."""
    cached = [inputs for inputs in requests if limits.find_limit(inputs.quality) > 0]
    family = detect_family(model_folder)
    if not cached or not family.caches_steps:
        return 0
    denoiser = "unet" if family.caches_patches else "transformer"
    config = read_json(model_folder / denoiser / "config.json")
    element_bytes = ELEMENT_BYTES[find_computing_format(formats[denoiser])]
    rows = [inputs.num_outputs * _count_passes(family, inputs) for inputs in cached]
    if family.caches_patches:
        sizes = [[side // family.size_multiple for side in (each.shape.height, each.shape.width)] for each in cached]
        own = [
            number * count_patch_numbers(config, *size) * element_bytes
            for number, size in zip(rows, sizes, strict=True)
        ]
        return _COPIES * sum(each for each in own if each <= limits.max_bytes)
    channels = config["dim"] if "dim" in config else config["num_attention_heads"] * config["attention_head_dim"]
    tokens = sum(
        number * (inputs.shape.tokens + family.count_image_tokens(inputs.shape)) * inputs.token_ratio
        for number, inputs in zip(rows, cached, strict=True)
    )
    return int(_COPIES * 2 * tokens * channels * element_bytes)


def count_patch_numbers(config: Mapping[str, Any], height: int, width: int) -> int:
    """The numbers that the stacks of transformer blocks of a U-Net with this config keep for one output and pass of
    guidance, whose latents have this size: for each token what entered a stack, and what each of its blocks added."""
    channels, levels = config["block_out_channels"], len(config["block_out_channels"])
    layers = _list_by_level(config.get("layers_per_block", 2), levels)
    depths = _list_by_level(config.get("transformer_layers_per_block", 1), levels)
    up_depths = config.get("reverse_transformer_layers_per_block") or depths[::-1]
    stacks = []
    if "CrossAttn" in (config.get("mid_block_type", "CrossAttn") or ""):
        stacks.append((levels - 1, depths[-1]))
    for level, (down, up) in enumerate(zip(config["down_block_types"], config["up_block_types"][::-1], strict=True)):
        if "CrossAttn" in down:
            stacks += [(level, depth) for depth in _list_by_level(depths[level], layers[level])]
        if "CrossAttn" in up:
            stacks += [(level, depth) for depth in _list_by_level(up_depths[levels - 1 - level], layers[level] + 1)]
    return sum(
        (1 + depth) * channels[level] * math.ceil(height / 2**level) * math.ceil(width / 2**level)
        for level, depth in stacks
    )


def _list_by_level(entry: Any, count: int) -> list[Any]:
    """An entry of a U-Net's config for each of its levels, or of the layers of a level."""
    return [entry] * count if isinstance(entry, int) else list(entry)


def _count_passes(family: Family, inputs: GenerationInputs) -> int:
    return 2 if family.negative_prompt and inputs.guidance_scale > family.unguided_scale else 1
