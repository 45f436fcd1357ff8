"""PixArt-Sigma (arXiv 2403.04692): a T5, a transformer with cross-attention to the text, the VAE of SDXL.

The result is that of the stock pipeline with `clean_caption` and `use_resolution_binning` off: the output has the
requested size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tridentserve.parallel import ulysses
from tridentserve.pipelines.adapters.conditions import list_negative_prompts, list_prompts, repeat_rows, split_rows
from tridentserve.pipelines.adapters.ddpm_adapter import DDPMAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs


class PixArtSigmaAdapter(DDPMAdapter):
    """`PixArtSigmaPipeline`. With guidance, the condition has two rows: negative, then positive.

    Condition: prompt_embeds (rows, 300, T5 dim) and prompt_mask (rows, 300).
    """

    family = "pixart_sigma"

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        embeds, mask, negative_embeds, negative_mask = self.pipe.encode_prompt(
            list_prompts(batch),
            do_classifier_free_guidance=batch[0].guidance_scale > 1,
            negative_prompt=list_negative_prompts(batch),
            device=self.device,
        )
        return split_rows(prompt_embeds=(negative_embeds, embeds), prompt_mask=(negative_mask, mask))

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        return {name: repeat_rows(tensors[name], num_outputs) for name in ("prompt_embeds", "prompt_mask")}

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        output: torch.Tensor = self.pipe.transformer(
            latents,
            encoder_hidden_states=rows["prompt_embeds"],
            encoder_attention_mask=rows["prompt_mask"],
            timestep=timesteps,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )[0]
        # Published models also predict a variance, in a second half of the channels, which no solver here uses.
        return output[:, : latents.shape[1]]

    def _install_sequence_parallelism(self) -> None:
        transformer = self.pipe.transformer
        ulysses.install(
            transformer.pos_embed,
            [block.attn1 for block in transformer.transformer_blocks],
            transformer.proj_out,
            text_first=True,
        )


ADAPTER = PixArtSigmaAdapter
