"""FLUX.2 dev by Black Forest Labs: a Mistral 3 reads the prompt; blocks and VAE are those of FLUX.2 klein.

Images from text; images from images are not made, nor is the prompt rewritten by the text encoder. Guidance is an
embedding: one row per output, and a negative prompt has no effect.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from tridentserve.errors import CheckpointError
from tridentserve.pipelines.adapters.conditions import per_request, prompts_of
from tridentserve.pipelines.adapters.diffusers_adapter import per_output
from tridentserve.pipelines.adapters.flux2_klein import Flux2KleinAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage


class Flux2Adapter(Flux2KleinAdapter):
    """`Flux2Pipeline`.

    Condition: prompt_embeds (1, 512, 3 Mistral dims), text_ids (512, 4).
    Latents: packed, (num_outputs, height / 16 * width / 16, 4 * channels).
    """

    family = "flux2"

    def __init__(self, pipe: Any, stages: frozenset[Stage], device: torch.device) -> None:
        super().__init__(pipe, stages, device)
        if Stage.ENCODE in stages and pipe.tokenizer.chat_template is None:
            raise CheckpointError("its tokenizer has no chat template; copy the folder again, chat_template.jinja too")

    def _encode_key(self, inputs: GenerationInputs) -> Hashable:
        return None

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        embeds, text_ids = self.pipe.encode_prompt(prompts_of(batch), device=self.device)
        return [condition | {"text_ids": text_ids[0]} for condition in per_request(prompt_embeds=(embeds,))]

    def _rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        scale = values["guidance_scale"]
        guidance = torch.full([1, num_outputs], scale, device=self.device, dtype=torch.float32)
        return {"prompt_embeds": per_output(tensors["prompt_embeds"], num_outputs), "guidance": guidance}


ADAPTER = Flux2Adapter
