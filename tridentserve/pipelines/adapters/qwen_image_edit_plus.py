"""Qwen-Image-Edit 2509 and 2511: a Qwen-Image-Edit whose text encoder sees smaller images than the VAE.

A request may have several input images, of which its prompt speaks as "Picture 1", "Picture 2" and so on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

from tridentserve.pipelines.adapters.qwen_image_edit import QwenImageEditAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs


class QwenImageEditPlusAdapter(QwenImageEditAdapter):
    """`QwenImageEditPlusPipeline`, called with one image, which has the proportions of the output, or with several.

    Condition and latents are those of Qwen-Image-Edit, with the tokens of all images.
    """

    family = "qwen_image_edit_plus"
    stock = pipeline_qwenimage_edit_plus
    text_pixels = pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE

    def _encode_key(self, inputs: GenerationInputs) -> Hashable:
        return super()._encode_key(inputs), len(inputs.images) > 1

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        if len(batch[0].images) == 1:
            return super()._encode_together(batch)
        # The stock pipeline takes several images for one prompt only.
        alone = super()._encode_together
        return [condition for inputs in batch for condition in alone([inputs])]

    def _list_images(self, batch: Sequence[GenerationInputs]) -> dict[str, Any]:
        images = super()._list_images(batch)
        # Every prompt speaks of all images of a list, and of one image of a tuple.
        return images if len(batch[0].images) > 1 else {name: tuple(each) for name, each in images.items()}


ADAPTER = QwenImageEditPlusAdapter
