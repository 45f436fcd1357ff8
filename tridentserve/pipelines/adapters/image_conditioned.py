"""The common part of families whose requests start from an input image, and that image as the VAEs take it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from tridentserve.models.input_image import open_input_image
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs


class ImageConditionedAdapter(DiffusersAdapter):
    """A mixin for a family that starts from an image. It stands before the adapter of the family without one."""

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        for inputs in batch:
            self._check_size(inputs.shape)
        conditions = super()._encode_together(batch)  # type: ignore[safe-super]  # of the other adapter
        return [condition | self._encode_image(inputs) for condition, inputs in zip(conditions, batch, strict=True)]

    @abstractmethod
    def _encode_image(self, inputs: GenerationInputs) -> Tensors:
        """Encode the input image: the tensors that it adds to the condition."""


def expand_to_outputs(tensor: torch.Tensor, passes: int, num_outputs: int) -> torch.Tensor:
    """Expand a tensor of the input image, (1, ...), to each pass and output: (passes, num_outputs, ...)."""
    return tensor.unsqueeze(1).expand(passes, num_outputs, *tensor.shape[1:])


def preprocess_image(processor: Any, inputs: GenerationInputs) -> torch.Tensor:
    """Resize the input image to the output with the pipeline's processor: (1, 3, height, width) from -1 to 1, in
    float32.

    So the cost of E and D depends on the size of the output only."""
    shape = inputs.shape
    pixels: torch.Tensor = processor.preprocess(open_input_image(inputs), height=shape.height, width=shape.width)
    return pixels
