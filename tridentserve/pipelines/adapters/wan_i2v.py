"""Wan 2.1 and 2.2 with an input image. Additional channels hold a mask and the latents of a video whose first frame is
the image.

Wan 2.1 also reads the image through a CLIP. Wan 2.2 has no CLIP; in TI2V-5B the first latent frame is that of the image
itself, at timestep 0. The VAE encodes as many frames as the output has, so E takes longer for larger videos.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import WanPipeline

from tridentserve.errors import ModelFolderError
from tridentserve.models.input_image import open_input_image
from tridentserve.pipelines.adapters.image_conditioned import (
    ImageConditionedAdapter,
    expand_to_outputs,
    preprocess_image,
)
from tridentserve.pipelines.adapters.video_adapter import read_statistic
from tridentserve.pipelines.adapters.wan import WanAdapter
from tridentserve.pipelines.base import DenoisingState, Tensors
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage


class WanImageAdapter(ImageConditionedAdapter, WanAdapter):
    """`WanImageToVideoPipeline`, without a last image.

    Condition: that of Wan; image_latents (1, channels, latent frames, height / 8, width / 8), scaled and in float32 in
    D, with one frame for TI2V-5B; image_embeds (1, tokens, image dim) where the transformer takes them.
    """

    family = "wan_i2v"

    def __init__(self, pipe: Any, stages: frozenset[Stage], device: torch.device) -> None:
        config = pipe.transformer.config
        if config.pos_embed_seq_len is not None:
            raise ModelFolderError("this transformer wants a last image too (pos_embed_seq_len), which is not served")
        if Stage.ENCODE in stages and config.image_dim is not None and pipe.image_encoder is None:
            raise ModelFolderError("this transformer wants what an image_encoder makes of images (image_dim)")
        super().__init__(pipe, stages, device)

    def _encode_image(self, inputs: GenerationInputs) -> Tensors:
        vae = self.pipe.vae
        frames = preprocess_image(self.pipe.video_processor, inputs).to(self.device, vae.dtype).unsqueeze(2)
        if not self.pipe.config.expand_timesteps:
            grey = frames.new_zeros(*frames.shape[:2], inputs.shape.num_frames - 1, *frames.shape[3:])
            frames = torch.cat([frames, grey], dim=2)
        # This is the mode of the VAE's distribution, so nothing is drawn.
        made = {"image_latents": vae.encode(frames).latent_dist.mode()}
        if self.pipe.transformer.config.image_dim is not None:
            image_embeds = self.pipe.encode_image(open_input_image(inputs), self.device)
            made["image_embeds"] = image_embeds.to(self._denoising_dtype)
        return made

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        vae, image_latents = self.pipe.vae, condition["image_latents"].float()
        scale = 1.0 / read_statistic(vae, "latents_std", image_latents)
        scaled = (image_latents - read_statistic(vae, "latents_mean", image_latents)) * scale
        return super()._initialize(condition, inputs, generator) | {"image_latents": scaled}

    def _prepare_latents(self, *arguments: Any, **options: Any) -> torch.Tensor:
        # This pipeline's own `prepare_latents` needs the image, which only E has; both pipelines draw the same noise.
        latents: torch.Tensor = WanPipeline.prepare_latents(self.pipe, *arguments, **options)
        return latents

    def _count_channels(self) -> int:
        channels: int = self.pipe.vae.config.z_dim
        return channels

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        rows = super()._build_rows(tensors, values, num_outputs)
        passes = len(rows["prompt_embeds"])
        rows["image_latents"] = expand_to_outputs(tensors["image_latents"], passes, num_outputs)
        if "image_embeds" in tensors:
            rows["image_embeds"] = expand_to_outputs(tensors["image_embeds"], passes, num_outputs)
        return rows

    def _expand_by_frame(self, timesteps: torch.Tensor, frames: int) -> torch.Tensor:
        return torch.cat([torch.zeros_like(timesteps[:, None]), super()._expand_by_frame(timesteps, frames - 1)], dim=1)

    def _build_model_input(self, latents: torch.Tensor, rows: Tensors) -> torch.Tensor:
        image_latents = rows["image_latents"]
        if self.pipe.config.expand_timesteps:
            return _replace_first_frame(latents, image_latents)
        # The mask states for each frame of a latent frame whether it is given. The first frame stands for all of its
        # own.
        given = torch.zeros_like(latents[:, : self.pipe.vae_scale_factor_temporal])
        given[:, :, 0] = 1
        return torch.cat([latents, given, image_latents], dim=1)

    def latents(self, state: DenoisingState) -> Tensors:
        made = super().latents(state)
        if self.pipe.config.expand_timesteps:
            made["latents"] = _replace_first_frame(made["latents"], state.tensors["image_latents"])
        return made


def _replace_first_frame(latents: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return torch.cat([first.expand(len(latents), *first.shape[1:]), latents[:, :, 1:]], dim=2)


ADAPTER = WanImageAdapter
