"""From prompts of several requests to the condition of each: what `_encode_together` of the families is made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs


def prompts_of(batch: Sequence[GenerationInputs]) -> list[str]:
    return [inputs.prompt for inputs in batch]


def negative_prompts_of(batch: Sequence[GenerationInputs]) -> list[str]:
    return [inputs.negative_prompt for inputs in batch]


def per_request(**rows: Sequence[torch.Tensor | None]) -> list[Tensors]:
    """Conditions of as many requests as the tensors have rows. Of each name: those of the negative prompts (None
    without guidance) and of the prompts, as the rows of a condition are ordered; or one tensor of the latter."""
    given = {name: [each for each in tensors if each is not None] for name, tensors in rows.items()}
    count = len(next(iter(given.values()))[0])
    return [
        {name: torch.cat([tensor[index : index + 1] for tensor in tensors]) for name, tensors in given.items()}
        for index in range(count)
    ]
