"""FLUX.1 Kontext (arXiv 2506.15742): FLUX.1 that edits an image, whose latents it sees behind those of the output.

The image is brought to the size of the output, so that D costs the same for all images of a size: about twice what
FLUX.1 takes, as there are twice as many image tokens. Positions tell the two apart by their first axis.
"""

from __future__ import annotations

from typing import Any

import torch

from tridentserve.pipelines.adapters.diffusers_adapter import per_output
from tridentserve.pipelines.adapters.flux import FluxAdapter
from tridentserve.pipelines.adapters.image_conditioned import ImageConditionedAdapter, preprocess_image
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs


class FluxKontextAdapter(ImageConditionedAdapter, FluxAdapter):
    """`FluxKontextPipeline`, as if called with the image in the output's size (`_auto_resize=False`, `max_area` the
    output's).

    Condition: FLUX's and image_latents (1, height / 16 * width / 16, 4 * channels), packed as the output's are.
    """

    family = "flux_kontext"

    def _encode_image(self, inputs: GenerationInputs, dtype: torch.dtype) -> Tensors:
        image = preprocess_image(self.pipe.image_processor, inputs).to(self.device, dtype)
        # The mode of the VAE's distribution: nothing is drawn.
        latents = self.pipe._encode_vae_image(image, generator=None)
        return {"image_latents": self.pipe._pack_latents(latents, *latents.shape)}

    def _initial_tensors(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        latents, _, output_ids, _ = self._packed_noise(inputs, condition["prompt_embeds"].dtype, generator, None)
        input_ids = output_ids.clone()
        input_ids[..., 0] = 1
        return {"latents": latents, "image_ids": torch.cat([output_ids, input_ids])}

    def _rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        return super()._rows(tensors, values, num_outputs) | {
            "image_latents": per_output(tensors["image_latents"], num_outputs)
        }

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        both = torch.cat([latents, rows["image_latents"]], dim=1)
        return super()._predict_noise(both, timesteps, rows, shared)[:, : latents.shape[1]]


ADAPTER = FluxKontextAdapter
