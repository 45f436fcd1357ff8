"""The choices of when a denoising step need not be computed whole. Configurations use this module, so it does not
import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import Field

from tridentserve.models.model_folder import detect_family, read_json
from tridentserve.models.number_formats import ELEMENT_BYTES, NumberFormat, find_computing_format
from tridentserve.options import options
from tridentserve.requests import GenerationInputs, Quality

# The time of a step relative to one that is computed whole, until requests of the quality have been observed.
# Simulations take it for the truth.
EXPECTED_SHARES: dict[Quality, float] = {"exact": 1.0, "high": 0.75, "fast": 0.5}

# While a step runs: what is kept, those of all requests together, the new ones, and the same gathered.
_COPIES = 4


@options
class StepCache:
    """The limits of change up to which a step takes over what the last computed step found, per `quality`."""

    high: float = Field(
        default=0.05,
        ge=0,
        description="Limit for requests of `quality: high`: the mean change of what the first block adds, relative to "
        "the last step that was computed whole.",
    )
    fast: float = Field(
        default=0.12,
        ge=0,
        description="Limit for requests of `quality: fast`. A larger limit skips more and changes the result more.",
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


def count_cache_bytes(
    model_folder: Path, requests: Iterable[GenerationInputs], formats: Mapping[str, NumberFormat]
) -> int:
    """Bytes that the caches of requests need on a device, beside what denoising needs anyway: twice the image tokens of
    each output and pass. `formats` are the number formats of the model's components. Raises `ModelFolderError` for a
    folder that is damaged."""
    cached = [inputs for inputs in requests if inputs.quality != "exact"]
    family = detect_family(model_folder)
    if not cached or not family.caches_steps:
        return 0
    config = read_json(model_folder / "transformer" / "config.json")
    channels = config["dim"] if "dim" in config else config["num_attention_heads"] * config["attention_head_dim"]
    rows = sum(
        inputs.num_outputs
        * (inputs.shape.tokens + family.count_image_tokens(inputs.shape))
        * inputs.token_ratio
        * (2 if family.negative_prompt and inputs.guidance_scale > family.unguided_scale else 1)
        for inputs in cached
    )
    return int(_COPIES * 2 * rows * channels * ELEMENT_BYTES[find_computing_format(formats["transformer"])])
