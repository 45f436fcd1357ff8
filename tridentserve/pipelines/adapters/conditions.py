"""Helpers of the families' `_encode_together`: from the prompts of several requests to the condition of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs

# Texts are padded to a multiple of this number of tokens.
_PADDED_TOKENS = 512


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


def join_texts(rows: Sequence[Sequence[torch.Tensor]]) -> list[Tensors]:
    """Join texts that have as many tokens as they need into the conditions of the requests. `rows` are the rows of a
    condition, each with a text of every request, (tokens, dim).

    A condition has `prompt_embeds` (rows, tokens of the longest, dim) and `text_tokens` (rows,)."""
    return [
        {
            "prompt_embeds": pad_sequence(list(texts), batch_first=True),
            "text_tokens": torch.tensor([len(text) for text in texts], device=texts[0].device),
        }
        for texts in zip(*rows, strict=True)
    ]


def repeat_texts(condition: Tensors, num_outputs: int) -> Tensors:
    """Repeat the texts of such a condition for each output. They are padded, so that requests can share a pass."""
    embeds = condition["prompt_embeds"]
    padded = pad(embeds, (0, 0, 0, -embeds.shape[1] % _PADDED_TOKENS))
    return {
        "prompt_embeds": repeat_rows(padded, num_outputs),
        "text_tokens": repeat_rows(condition["text_tokens"], num_outputs),
    }
