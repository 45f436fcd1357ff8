"""A tiny CogVideoX that starts from images."""

from __future__ import annotations

from typing import Any

import diffusers

from tridentserve.pipelines.tiny import cogvideox as tiny_video_cogvideox
from tridentserve.pipelines.tiny import parts


def recipe() -> Any:
    """As CogVideoX1.5-5B-I2V: latent frames in pairs, an embedding of an offset."""
    return tiny_video_cogvideox.pipeline(
        diffusers.CogVideoXImageToVideoPipeline,
        invert_scale_latents=True,
        in_channels=2 * parts.LATENT_CHANNELS,
        patch_size_t=2,
        sample_frames=81,
        ofs_embed_dim=tiny_video_cogvideox.TIME_DIM,
    )
