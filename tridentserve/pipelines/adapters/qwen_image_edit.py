"""Qwen-Image-Edit: a Qwen-Image that edits an image. The Qwen2.5-VL sees it beside the prompt, and its latents follow
those of the output.

The stock pipeline scales every input image to about a megapixel. Here an image that is alone takes the proportions of
the output as well, so that the time of D depends on the size of the output only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image

from tridentserve.errors import InvalidRequestError
from tridentserve.models.families import FAMILIES, MEGAPIXEL
from tridentserve.models.input_image import open_input_images
from tridentserve.pipelines.adapters.conditions import repeat_rows
from tridentserve.pipelines.adapters.image_conditioned import ImageConditionedAdapter
from tridentserve.pipelines.adapters.qwen_image import QwenImageAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs


class QwenImageEditAdapter(ImageConditionedAdapter, QwenImageAdapter):
    """`QwenImageEditPipeline`, whose input image has the proportions of the output.

    Condition: that of Qwen-Image, with the tokens of the image in the text, image_latents (1, tokens of about a
    megapixel, 4 * channels), packed like the output's, and image_grid (1, 3): frames, rows and columns of these tokens.
    """

    family = "qwen_image_edit"
    stock: ClassVar[ModuleType] = pipeline_qwenimage_edit
    """The module of the stock pipeline, with its `calculate_dimensions`."""
    text_pixels: ClassVar[int] = MEGAPIXEL
    """About so many pixels an image has for the text encoder."""

    def _list_images(self, batch: Sequence[GenerationInputs]) -> dict[str, Any]:
        marker = self.pipe.processor.image_token
        for inputs in batch:
            for name in ("prompt", "negative_prompt"):
                if marker in getattr(inputs, name):
                    raise InvalidRequestError(f"{name}: must not contain {marker}, which stands for the image", name)
        return {"image": [image for inputs in batch for image in self._scale_images(inputs, self.text_pixels)]}

    def _encode_image(self, inputs: GenerationInputs) -> Tensors:
        packed, grid = [], []
        for image in self._scale_images(inputs, FAMILIES[self.family].image_pixels):
            pixels = self.pipe.image_processor.preprocess(image).unsqueeze(2)
            # This is the mode of the VAE's distribution, so nothing is drawn.
            latents = self.pipe._encode_vae_image(pixels.to(self.device, self.pipe.vae.dtype), generator=None)
            batch, channels, _, height, width = latents.shape
            packed.append(self.pipe._pack_latents(latents, batch, channels, height, width))
            grid.append([1, height // 2, width // 2])
        return {"image_latents": torch.cat(packed, dim=1).to(self._denoising_dtype), "image_grid": torch.tensor(grid)}

    def _scale_images(self, inputs: GenerationInputs, pixels: int | None) -> list[Image.Image]:
        """Scale the input images to about so many pixels, as the stock pipeline does: one in the proportions of the
        output, several each in its own."""
        images, shape = open_input_images(inputs), inputs.shape
        scaled = []
        for image in images:
            ratio = shape.width / shape.height if len(images) == 1 else image.width / image.height
            width, height, *_ = self.stock.calculate_dimensions(pixels, ratio)
            scaled.append(self.pipe.image_processor.resize(image, height, width))
        return scaled

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        latents, _ = self._draw_packed_noise(inputs, condition["prompt_embeds"].dtype, generator, None)
        own = torch.tensor([[1, inputs.shape.height // 16, inputs.shape.width // 16]])
        return {"latents": latents, "grid": torch.cat([own, condition.pop("image_grid").cpu()])}

    def _list_image_sizes(self, tensors: Tensors) -> Hashable:
        return tuple(map(tuple, tensors["grid"].tolist()))

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
