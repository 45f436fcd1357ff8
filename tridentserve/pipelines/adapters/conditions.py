"""Helpers of the families' `_encode_together`: from the prompts of several requests to the condition of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs


def list_prompts(batch: Sequence[GenerationInputs]) -> list[str]:
    """The prompt of each request."""
    return [inputs.prompt for inputs in batch]


def list_negative_prompts(batch: Sequence[GenerationInputs]) -> list[str]:
    """The negative prompt of each request, which may be empty."""
    return [inputs.negative_prompt for inputs in batch]


def split_rows(**rows: Sequence[torch.Tensor | None]) -> list[Tensors]:
    """Split tensors with a row for each request into the conditions of the requests.

    Each name has a tensor for the negative prompts (None without guidance) and a tensor for the prompts, in the order
    of a condition's rows, or only the tensor for the prompts."""
    given = {name: [each for each in tensors if each is not None] for name, tensors in rows.items()}
    count = len(next(iter(given.values()))[0])
    return [
        {name: torch.cat([tensor[index : index + 1] for tensor in tensors]) for name, tensors in given.items()}
        for index in range(count)
    ]


def repeat_rows(row: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """Repeat rows of a condition, (passes, ...), for each output: (passes, num_outputs, ...). The result is a view."""
    return row.unsqueeze(1).expand(row.shape[0], num_outputs, *row.shape[1:])
