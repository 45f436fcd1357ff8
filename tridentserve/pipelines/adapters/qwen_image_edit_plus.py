"""Qwen-Image-Edit 2509 and 2511: a Qwen-Image-Edit whose text encoder sees a smaller image than the VAE.

The stock pipeline takes several input images. Here a request has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

from tridentserve.pipelines.adapters.qwen_image_edit import QwenImageEditAdapter
from tridentserve.requests import GenerationInputs, Shape


class QwenImageEditPlusAdapter(QwenImageEditAdapter):
    """`QwenImageEditPlusPipeline`, called with one image, which has the proportions of the output.

    Condition and latents are those of Qwen-Image-Edit.
    """

    family = "qwen_image_edit_plus"
    stock = pipeline_qwenimage_edit_plus

    def _list_images(self, batch: Sequence[GenerationInputs]) -> dict[str, Any]:
        # Every prompt speaks of all images of a list, and of one image of a tuple.
        return {name: tuple(images) for name, images in super()._list_images(batch).items()}

    def _choose_size_for_text(self, shape: Shape) -> tuple[int, int]:
        width, height = self.stock.calculate_dimensions(self.stock.CONDITION_IMAGE_SIZE, shape.width / shape.height)
        return width, height


ADAPTER = QwenImageEditPlusAdapter
