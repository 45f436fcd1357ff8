"""FLUX.1 Kontext (arXiv 2506.15742): a FLUX.1 that edits an image, whose latents follow those of the output.

The input image is resized to the output, so that D takes the same time for all input images: about twice that of
FLUX.1, since there are twice as many image tokens. The first axis of the positions tells the two images apart.
"""

from __future__ import annotations

from typing import Any

import torch

from tridentserve.pipelines.adapters.conditions import repeat_rows
from tridentserve.pipelines.adapters.flux import FluxAdapter
from tridentserve.pipelines.adapters.image_conditioned import ImageConditionedAdapter, preprocess_image
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs


class FluxKontextAdapter(ImageConditionedAdapter, FluxAdapter):
    """`FluxKontextPipeline`, called with the image in the output's size, `_auto_resize=False` and the output's
    `max_area`.

    Condition: that of FLUX.1 and image_latents (1, height / 16 * width / 16, 4 * channels), packed like the output's.
    """

    family = "flux_kontext"

    def _encode_image(self, inputs: GenerationInputs) -> Tensors:
        image = preprocess_image(self.pipe.image_processor, inputs).to(self.device, self.pipe.vae.dtype)
        # This is the mode of the VAE's distribution, so nothing is drawn.
        latents = self.pipe._encode_vae_image(image, generator=None)
        packed = self.pipe._pack_latents(latents, *latents.shape)
        return {"image_latents": packed.to(self._denoising_dtype)}

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        latents, _, output_ids, _ = self._draw_packed_noise(inputs, condition["prompt_embeds"].dtype, generator, None)
        input_ids = output_ids.clone()
        input_ids[..., 0] = 1
        return {"latents": latents, "image_ids": torch.cat([output_ids, input_ids])}

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        return super()._build_rows(tensors, values, num_outputs) | {
            "image_latents": repeat_rows(tensors["image_latents"], num_outputs)
        }

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        both = torch.cat([latents, rows["image_latents"]], dim=1)
        return super()._predict_noise(both, timesteps, rows, shared)[:, : latents.shape[1]]


ADAPTER = FluxKontextAdapter
