"""HunyuanVideo 1.5 with an input image: its latents are additional channels of the first frame, and a SigLIP reads
it."""

from __future__ import annotations

from typing import Any

import torch

from tridentserve.errors import ModelFolderError
from tridentserve.models.input_image import open_input_image
from tridentserve.pipelines.adapters.hunyuan_video_15 import HunyuanVideo15Adapter
from tridentserve.pipelines.adapters.image_conditioned import ImageConditionedAdapter, expand_to_outputs
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage


class HunyuanVideo15ImageAdapter(ImageConditionedAdapter, HunyuanVideo15Adapter):
    """`HunyuanVideo15ImageToVideoPipeline` in the requested size, which the stock pipeline chooses by the image's
    proportions. The image is scaled to cover the output, and cropped.

    Condition: that of HunyuanVideo 1.5; image_latents (1, channels, 1, height / 16, width / 16), scaled; image_embeds
    (1, tokens, image dim).
    """

    family = "hunyuan_video_15_i2v"

    def __init__(self, pipe: Any, stages: frozenset[Stage], device: torch.device) -> None:
        if pipe.transformer.config.use_meanflow:
            raise ModelFolderError(
                "this transformer wants two timesteps at each step (use_meanflow), which is not served"
            )
        super().__init__(pipe, stages, device)

    def _encode_image(self, inputs: GenerationInputs) -> Tensors:
        pipe = self.pipe
        size = {"height": inputs.shape.height, "width": inputs.shape.width}
        image = pipe.video_processor.resize(open_input_image(inputs), **size, resize_mode="crop")
        image_latents = pipe._get_image_latents(pipe.vae, pipe.video_processor, image, **size, device=self.device)
        taken = self._denoising_dtype
        image_embeds = pipe.encode_image(image, batch_size=1, device=self.device, dtype=taken)
        return {"image_latents": image_latents.to(taken), "image_embeds": image_embeds}

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        rows = super()._build_rows(tensors, values, num_outputs)
        passes = len(rows["prompt_embeds"])
        return rows | {
            name: expand_to_outputs(tensors[name], passes, num_outputs) for name in ("image_latents", "image_embeds")
        }

    def _make_first_image(
        self, latents: torch.Tensor, rows: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        image_latents = torch.cat([rows["image_latents"], torch.zeros_like(latents[:, :, 1:])], dim=2)
        given = torch.zeros_like(latents[:, :1])
        given[:, :, 0] = 1
        return image_latents, given, rows["image_embeds"]


ADAPTER = HunyuanVideo15ImageAdapter
