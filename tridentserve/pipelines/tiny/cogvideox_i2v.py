"""A tiny CogVideoX with an input image."""

from __future__ import annotations

from typing import Any

import diffusers

from tridentserve.pipelines.tiny import cogvideox, parts


def build_pipeline() -> Any:
    """Build a CogVideoX1.5-5B-I2V: latent frames in pairs, an embedding of an offset."""
    return cogvideox.assemble_pipeline(
        diffusers.CogVideoXImageToVideoPipeline,
        invert_scale_latents=True,
        in_channels=2 * parts.LATENT_CHANNELS,
        patch_size_t=2,
        sample_frames=81,
        ofs_embed_dim=cogvideox.TIME_DIM,
    )
