"""HunyuanDiT (arXiv 2405.08748): a BERT and a T5, a transformer with cross-attention and rotary positions, a VAE.

The result is that of the stock pipeline with `use_resolution_binning` off: the output has the requested size. No safety
checker runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

from tridentserve.parallel import ulysses
from tridentserve.pipelines.adapters.conditions import list_negative_prompts, list_prompts, repeat_rows, split_rows
from tridentserve.pipelines.adapters.ddpm_adapter import DDPMAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs

_ROWS = ("prompt_embeds", "prompt_mask", "prompt_embeds_2", "prompt_mask_2", "time_ids", "style")
# The numbers of text tokens of the BERT and of the T5, and the size of the images in training.
_TEXT_TOKENS = (77, 256)
_ORIGINAL_SIZE = (1024, 1024)


class HunyuanDiTAdapter(DDPMAdapter):
    """`HunyuanDiTPipeline`. With guidance, the condition has two rows: negative, then positive.

    Condition: prompt_embeds (rows, 77, BERT dim), prompt_embeds_2 (rows, 256, T5 dim), and a mask of each.
    """

    family = "hunyuan_dit"

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        rows: dict[str, tuple[torch.Tensor | None, torch.Tensor]] = {}
        for index, suffix in enumerate(("", "_2")):
            embeds, negative_embeds, mask, negative_mask = self.pipe.encode_prompt(
                list_prompts(batch),
                device=self.device,
                dtype=self._denoising_dtype,
                do_classifier_free_guidance=batch[0].guidance_scale > 1,
                negative_prompt=list_negative_prompts(batch),
                max_sequence_length=_TEXT_TOKENS[index],
                text_encoder_index=index,
            )
            rows |= {f"prompt_embeds{suffix}": (negative_embeds, embeds), f"prompt_mask{suffix}": (negative_mask, mask)}
        return split_rows(**rows)

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        embeds, transformer = condition["prompt_embeds"], self.pipe.transformer
        size = (inputs.shape.height, inputs.shape.width)
        passes = len(embeds)
        time_ids = torch.tensor([[*_ORIGINAL_SIZE, *size, 0, 0]], dtype=embeds.dtype, device=self.device)
        patch = transformer.config.patch_size
        grid = (size[0] // 8 // patch, size[1] // 8 // patch)
        cos, sin = get_2d_rotary_pos_embed(
            transformer.inner_dim // transformer.num_heads,
            get_resize_crop_region_for_grid(grid, 512 // 8 // patch),
            grid,
            device=self.device,
            output_type="pt",
        )
        return super()._initialize(condition, inputs, generator) | {
            "time_ids": time_ids.repeat(passes, 1),
            "style": torch.zeros(passes, dtype=torch.long, device=self.device),
            "rotary_cos": cos,
            "rotary_sin": sin,
        }

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        return {name: repeat_rows(tensors[name], num_outputs) for name in _ROWS}

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        output: torch.Tensor = self.pipe.transformer(
            latents,
            timesteps.to(latents.dtype),
            encoder_hidden_states=rows["prompt_embeds"],
            text_embedding_mask=rows["prompt_mask"],
            encoder_hidden_states_t5=rows["prompt_embeds_2"],
            text_embedding_mask_t5=rows["prompt_mask_2"],
            image_meta_size=rows["time_ids"],
            style=rows["style"],
            image_rotary_emb=(shared["rotary_cos"], shared["rotary_sin"]),
            return_dict=False,
        )[0]
        # The other half of the channels is a predicted variance.
        return output.chunk(2, dim=1)[0]

    def _install_sequence_parallelism(self) -> None:
        transformer = self.pipe.transformer
        ulysses.install(
            transformer.pos_embed,
            [block.attn1 for block in transformer.blocks],
            transformer.proj_out,
            text_first=True,
            rotated=transformer.blocks,
        )


ADAPTER = HunyuanDiTAdapter
