"""The noise levels of the image model: higher ones for larger pictures.

Noise of the same level hides less of a large picture, since each thing in it covers more latents. So where things are
is decided at higher levels there, which both the training and the scheduler have to pass more often.
"""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

from lib.training.flow import SHIFT

# Latents are cut into patches of 2 x 2: pictures of 128 and of 256 pixels have these many tokens.
_SMALL_TOKENS, _LARGE_TOKENS, _LARGE_SHIFT = 64, 256, 6.0


def choose_shift(height: int, width: int) -> float:
    """The shift of the noise levels for latents of this size, as the scheduler of `make_scheduler` chooses it."""
    shift: float = calculate_shift(height * width / 4, _SMALL_TOKENS, _LARGE_TOKENS, SHIFT, _LARGE_SHIFT)
    return shift


def make_scheduler() -> Any:
    """The scheduler of the model."""
    return diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        time_shift_type="linear",
        base_image_seq_len=_SMALL_TOKENS,
        max_image_seq_len=_LARGE_TOKENS,
        base_shift=SHIFT,
        max_shift=_LARGE_SHIFT,
    )
