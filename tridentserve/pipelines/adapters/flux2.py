"""FLUX.2 dev by Black Forest Labs: a Mistral 3 reads the prompt; blocks and VAE are those of FLUX.2 klein.

Input images are optional, as with FLUX.2 klein. The text encoder sees none of them, and does not rewrite the prompt.
Guidance is an embedding, so each output has one row and a negative prompt has no effect.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from tridentserve.errors import ModelFolderError
from tridentserve.pipelines.adapters.conditions import list_prompts, split_rows
from tridentserve.pipelines.adapters.flux2_klein import Flux2KleinAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage


class Flux2Adapter(Flux2KleinAdapter):
    """`Flux2Pipeline`.

    Condition: prompt_embeds (1, 512, 3 Mistral dims), text_ids (512, 4), and of input images what FLUX.2 klein has.
    Latents: packed, (num_outputs, height / 16 * width / 16, 4 * channels).
    """

    family = "flux2"

    def __init__(self, pipe: Any, stages: frozenset[Stage], device: torch.device) -> None:
        super().__init__(pipe, stages, device)
        if Stage.ENCODE in stages and pipe.tokenizer.chat_template is None:
            raise ModelFolderError("its tokenizer has no chat template; copy the folder again, chat_template.jinja too")

    def _encode_key(self, inputs: GenerationInputs) -> Hashable:
        return None

    def _encode_prompts(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        embeds, text_ids = self.pipe.encode_prompt(list_prompts(batch), device=self.device)
        return [condition | {"text_ids": text_ids[0]} for condition in split_rows(prompt_embeds=(embeds,))]

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        scale = values["guidance_scale"]
        guidance = torch.full([1, num_outputs], scale, device=self.device, dtype=torch.float32)
        return super()._build_rows(tensors, values, num_outputs) | {"guidance": guidance}


ADAPTER = Flux2Adapter
