"""Qwen-Image (arXiv 2508.02324): a Qwen2.5-VL reads the prompt, an MMDiT with rotary positions, a causal 3D VAE.

A prompt has as many tokens as its text needs. Requests that share a forward pass are padded to the longest prompt, with
a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from tridentserve.parallel import ulysses
from tridentserve.pipelines.adapters.conditions import join_texts, list_negative_prompts, list_prompts, repeat_texts
from tridentserve.pipelines.adapters.image_start import ImageStartAdapter
from tridentserve.pipelines.adapters.timestep_shift import compute_shift_mu, set_shifted_timesteps
from tridentserve.pipelines.adapters.video_adapter import read_statistic
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs, ImageStart, Shape

# The stock pipeline's default. Longer prompts are cut.
_MAX_TEXT_TOKENS = 512


class QwenImageAdapter(ImageStartAdapter):
    """`QwenImagePipeline`, and its image-to-image and inpainting pipelines. With guidance, the condition has two rows:
    negative, then positive.

    Condition: prompt_embeds (rows, tokens of the longer, dim), text_tokens (rows,).
    Latents: packed, (num_outputs, height / 16 * width / 16, 4 * channels).
    """

    family = "qwen_image"
    passes_share_a_call = False

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        # Negative prompts and prompts in two calls, so that in a batch of one neither is padded.
        images = self._list_images(batch)
        rows = [self._encode_prompts(list_prompts(batch), **images)]
        if batch[0].guidance_scale > 1:
            rows.insert(0, self._encode_prompts(list_negative_prompts(batch), **images))
        return join_texts(rows)

    def _list_images(self, batch: Sequence[GenerationInputs]) -> dict[str, Any]:
        """The further argument of the stock pipeline's `encode_prompt` where prompts speak of images."""
        return {}

    def _encode_prompts(self, prompts: list[str], **images: Any) -> list[torch.Tensor]:
        """Encode each prompt as the tokens that it has, (tokens, dim)."""
        embeds, mask = self.pipe.encode_prompt(
            prompts, device=self.device, max_sequence_length=_MAX_TEXT_TOKENS, **images
        )
        lengths = [embeds.shape[1]] * len(prompts) if mask is None else mask.sum(dim=1).tolist()
        return [row[: int(length)] for row, length in zip(embeds, lengths, strict=True)]

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        latents = self._draw_packed_noise(inputs, condition["prompt_embeds"].dtype, generator)
        return {"latents": latents, "grid": torch.tensor([[1, inputs.shape.height // 16, inputs.shape.width // 16]])}

    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        sigmas = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        mu = compute_shift_mu(scheduler.config, latents.shape[1], max_shift=1.15)
        set_shifted_timesteps(scheduler, num_inference_steps, self.device, sigmas, mu)

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        # Padding that all rows of a pass have is cut off again.
        return repeat_texts(tensors, num_outputs)

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        tokens = rows["text_tokens"]
        longest = int(tokens.max())
        mask = torch.arange(longest, device=self.device) < tokens[:, None]
        transformer = self.pipe.transformer
        with transformer.cache_context("cond"):
            noise: torch.Tensor = transformer(
                hidden_states=latents,
                timestep=timesteps.to(latents.dtype) / 1000,
                encoder_hidden_states_mask=None if bool(mask.all()) else mask,
                encoder_hidden_states=rows["prompt_embeds"][:, :longest],
                img_shapes=[[tuple(image) for image in shared["grid"].tolist()]] * len(latents),
                return_dict=False,
            )[0]
        return noise

    def _apply_guidance(self, noise: torch.Tensor, values: dict[str, Any], timestep: torch.Tensor) -> torch.Tensor:
        guided = super()._apply_guidance(noise, values, timestep)
        if noise.shape[0] == 1:
            return guided
        wanted, actual = (torch.norm(each, dim=-1, keepdim=True) for each in (noise[1], guided))
        rescaled: torch.Tensor = guided * (wanted / actual)
        return rescaled

    def _find_distribution(self, image: torch.Tensor) -> DiagonalGaussianDistribution:
        return super()._find_distribution(image.unsqueeze(2))  # a video of one frame

    def _scale_start(self, latents: torch.Tensor, start: ImageStart) -> torch.Tensor:
        std, mean = (read_statistic(self.pipe.vae, name, latents) for name in ("latents_std", "latents_mean"))
        return ((latents - mean) * (1.0 / std))[:, :, 0]

    def _pack_start(self, latents: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = self.pipe._pack_latents(latents, *latents.shape)
        return packed

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        unpacked: torch.Tensor = self.pipe._unpack_latents(
            latents, shape.height, shape.width, self.pipe.vae_scale_factor
        )
        return unpacked

    def _select_frame(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        return self._unpack(latents, shape)[:, :, 0]

    def _decode_frame(self, latents: torch.Tensor) -> torch.Tensor:
        return self._decode(latents[:, :, None])

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.pipe.vae
        std, mean = read_statistic(vae, "latents_std", latents), read_statistic(vae, "latents_mean", latents)
        scaled = latents / (1.0 / std) + mean
        image: torch.Tensor = vae.decode(scaled, return_dict=False)[0][:, :, 0]
        return image

    def _install_sequence_parallelism(self) -> None:
        transformer = self.pipe.transformer
        ulysses.install(
            transformer.img_in,
            [block.attn for block in transformer.transformer_blocks],
            transformer.proj_out,
            text_first=True,
            positions=transformer.pos_embed,
            joint_positions=False,
        )
        for block in transformer.transformer_blocks:
            block.register_forward_pre_hook(_share_modulation, with_kwargs=True)


def _share_modulation(block: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Select this rank's rows of the table that tells tokens of the output from those of an input image, which some
    models modulate as if they were clean."""
    if kwargs.get("modulate_index") is None:
        return None
    return args, kwargs | {"modulate_index": ulysses.share(kwargs["modulate_index"], dim=1)}


ADAPTER = QwenImageAdapter
