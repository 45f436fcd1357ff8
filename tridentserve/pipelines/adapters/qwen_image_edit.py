"""Qwen-Image-Edit: a Qwen-Image that edits an image. The Qwen2.5-VL sees it beside the prompt, and its latents follow
those of the output.

The stock pipeline scales every input image to about a megapixel. Here the image takes the proportions of the output as
well, so that the time of D depends on the size of the output only.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image

from tridentserve.errors import InvalidRequestError
from tridentserve.models.families import FAMILIES
from tridentserve.models.input_image import open_input_image
from tridentserve.pipelines.adapters.conditions import repeat_rows
from tridentserve.pipelines.adapters.image_conditioned import ImageConditionedAdapter
from tridentserve.pipelines.adapters.qwen_image import QwenImageAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs, Shape


class QwenImageEditAdapter(ImageConditionedAdapter, QwenImageAdapter):
    """`QwenImageEditPipeline`, whose input image has the proportions of the output.

    Condition: that of Qwen-Image, with the tokens of the image in the text, and image_latents (1, tokens of about a
    megapixel, 4 * channels), packed like the output's.
    """

    family = "qwen_image_edit"
    stock: ClassVar[ModuleType] = pipeline_qwenimage_edit
    """The module of the stock pipeline, with its `calculate_dimensions`."""

    def _list_images(self, batch: Sequence[GenerationInputs]) -> dict[str, Any]:
        marker = self.pipe.processor.image_token
        for inputs in batch:
            for name in ("prompt", "negative_prompt"):
                if marker in getattr(inputs, name):
                    raise InvalidRequestError(f"{name}: must not contain {marker}, which stands for the image", name)
        return {"image": [self._scale_image(inputs, self._choose_size_for_text(inputs.shape)) for inputs in batch]}

    def _encode_image(self, inputs: GenerationInputs) -> Tensors:
        image = self._scale_image(inputs, self._choose_size(inputs.shape))
        pixels = self.pipe.image_processor.preprocess(image).unsqueeze(2)
        # This is the mode of the VAE's distribution, so nothing is drawn.
        latents = self.pipe._encode_vae_image(pixels.to(self.device, self.pipe.vae.dtype), generator=None)
        batch, channels, _, height, width = latents.shape
        packed = self.pipe._pack_latents(latents, batch, channels, height, width)
        return {"image_latents": packed.to(self._denoising_dtype)}

    def _scale_image(self, inputs: GenerationInputs, size: tuple[int, int]) -> Image.Image:
        """Scale the input image to a width and a height, as the stock pipeline does."""
        width, height = size
        scaled: Image.Image = self.pipe.image_processor.resize(open_input_image(inputs), height, width)
        return scaled

    def _choose_size(self, shape: Shape) -> tuple[int, int]:
        """The width and height of the image for the VAE."""
        width, height, *_ = self.stock.calculate_dimensions(
            FAMILIES[self.family].image_pixels, shape.width / shape.height
        )
        return width, height

    def _choose_size_for_text(self, shape: Shape) -> tuple[int, int]:
        """The width and height of the image for the text encoder."""
        return self._choose_size(shape)

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        latents, _ = self._draw_packed_noise(inputs, condition["prompt_embeds"].dtype, generator, None)
        width, height = self._choose_size(inputs.shape)
        sizes = ((inputs.shape.height, inputs.shape.width), (height, width))
        return {"latents": latents, "grid": torch.tensor([[1, height // 16, width // 16] for height, width in sizes])}

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        rows = super()._build_rows(tensors, values, num_outputs)
        image = tensors["image_latents"].expand(len(tensors["prompt_embeds"]), -1, -1)
        return rows | {"image_latents": repeat_rows(image, num_outputs)}

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        both = torch.cat([latents, rows["image_latents"]], dim=1)
        return super()._predict_noise(both, timesteps, rows, shared)[:, : latents.shape[1]]


ADAPTER = QwenImageEditAdapter
