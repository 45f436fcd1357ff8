"""FLUX.1 Fill: a FLUX.1 that paints the masked part of an image anew. The rest of the image and the mask are further
channels of each token.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.utils.torch_utils import randn_tensor

from tridentserve.models.input_image import open_mask
from tridentserve.pipelines.adapters.conditions import repeat_rows
from tridentserve.pipelines.adapters.flux import FluxAdapter
from tridentserve.pipelines.adapters.image_conditioned import ImageConditionedAdapter, preprocess_image
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs

# The entries of the condition that D removes when it has drawn the latents.
_DISTRIBUTION, _MASK = "image_distribution", "mask"


class FluxFillAdapter(ImageConditionedAdapter, FluxAdapter):
    """`FluxFillPipeline`, with `strength` 1: the output begins as noise alone.

    Condition: that of FLUX.1, image_distribution, means and logarithms of variances of what the mask leaves of the
    image, (1, 2 * channels, height / 8, width / 8), and mask (1, height / 16 * width / 16, 256). State: masked_image
    (1, height / 16 * width / 16, 4 * channels + 256), the latents of the image beside the mask.
    """

    family = "flux_fill"

    def _encode_image(self, inputs: GenerationInputs) -> Tensors:
        pipe, shape = self.pipe, inputs.shape
        image = preprocess_image(pipe.image_processor, inputs)
        mask = pipe.mask_processor.preprocess(open_mask(inputs), height=shape.height, width=shape.width)
        left = (image * (1 - mask)).to(self.device, pipe.vae.dtype)
        factor = pipe.vae_scale_factor
        # Each pixel of the mask that a latent covers is a channel.
        channels = torch.nn.functional.pixel_unshuffle(mask, factor)
        packed = pipe._pack_latents(channels, *channels.shape)
        return {
            _DISTRIBUTION: pipe.vae.encode(left).latent_dist.parameters,
            _MASK: packed.to(self.device, self._denoising_dtype),
        }

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        pipe, dtype = self.pipe, condition["prompt_embeds"].dtype
        distribution, mask = DiagonalGaussianDistribution(condition.pop(_DISTRIBUTION)), condition.pop(_MASK)
        shape = distribution.mean.shape
        # The stock pipeline draws latents of the whole image first, which are no part of pure noise.
        distribution.sample(generator)
        noise = randn_tensor((inputs.num_outputs, *shape[1:]), generator=generator, device=self.device, dtype=dtype)
        config = pipe.vae.config
        left = ((distribution.sample(generator) - config.shift_factor) * config.scaling_factor).to(dtype)
        height, width = shape[2] // 2, shape[3] // 2
        return {
            "latents": pipe._pack_latents(noise, *noise.shape),
            "image_ids": pipe._prepare_latent_image_ids(1, height, width, self.device, dtype),
            "masked_image": torch.cat([pipe._pack_latents(left, *shape), mask], dim=-1),
        }

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        return super()._build_rows(tensors, values, num_outputs) | {
            "masked_image": repeat_rows(tensors["masked_image"], num_outputs)
        }

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        return super()._predict_noise(torch.cat([latents, rows["masked_image"]], dim=2), timesteps, rows, shared)


ADAPTER = FluxFillAdapter
