"""CogVideoX 1.0 and 1.5 with an input image: its latents are the first frame of additional channels.

The image's latents are drawn from the VAE's distribution, anew for each output, by the generator that then draws the
noise. So E returns the distribution and D draws from it: E depends on no seed and runs once for all outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from tridentserve.errors import InvalidRequestError
from tridentserve.pipelines.adapters.cogvideox import CogVideoXAdapter
from tridentserve.pipelines.adapters.image_conditioned import ImageConditionedAdapter, preprocess_image
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs, Shape

# The entry of the condition that D removes when it has drawn the latents.
_DISTRIBUTION = "image_distribution"


class CogVideoXImageAdapter(ImageConditionedAdapter, CogVideoXAdapter):
    """`CogVideoXImageToVideoPipeline`. The transformer takes twice the channels that it returns.

    Condition: that of CogVideoX and image_distribution, means and logarithms of variances, (1, 2 * channels, 1, height
    / 8, width / 8). State: image_latents (num_outputs, 1, channels, height / 8, width / 8).
    """

    family = "cogvideox_i2v"

    def _encode_image(self, inputs: GenerationInputs) -> Tensors:
        image = preprocess_image(self.pipe.video_processor, inputs).to(self.device, self.pipe.vae.dtype)
        # The frame leaves its batch and enters another, as in the stock pipeline, since strides choose a convolution's
        # kernel.
        (frame,) = image.unsqueeze(2)
        return {_DISTRIBUTION: self.pipe.vae.encode(frame.unsqueeze(0)).latent_dist.parameters}

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        distribution = DiagonalGaussianDistribution(condition.pop(_DISTRIBUTION))
        drawn = torch.cat([distribution.sample(generator) for _ in range(inputs.num_outputs)])
        drawn = drawn.to(condition["prompt_embeds"].dtype).permute(0, 2, 1, 3, 4)
        factor = self.pipe.vae_scaling_factor_image
        # Version 1.5 was trained with inverted scales.
        scaled = 1 / factor * drawn if self.pipe.vae.config.invert_scale_latents else factor * drawn
        return super()._initialize(condition, inputs, generator) | {"image_latents": scaled}

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        rows = super()._build_rows(tensors, values, num_outputs)
        image_latents = tensors["image_latents"]
        return rows | {"image_latents": image_latents.expand(len(rows["prompt_embeds"]), *image_latents.shape)}

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        image = torch.cat([rows["image_latents"], torch.zeros_like(latents[:, 1:])], dim=1)
        return super()._predict_noise(torch.cat([latents, image], dim=2), timesteps, rows, shared)

    def _check_size(self, shape: Shape) -> None:
        super()._check_size(shape)
        config, factor = self.pipe.transformer.config, self.pipe.vae_scale_factor_spatial
        only = Shape(config.sample_height * factor, config.sample_width * factor)
        # The positions of CogVideoX 1.0 5B were learned at one size.
        if config.use_learned_positional_embeddings and (shape.height, shape.width) != (only.height, only.width):
            raise InvalidRequestError(f"size {shape} cannot be made: this model makes videos of {only} only", "size")


ADAPTER = CogVideoXImageAdapter
