"""HunyuanVideo (arXiv 2412.03603): a Llama and a CLIP, double and single stream blocks, a causal 3-D VAE.

Guidance is an embedding, so each output has one row and a negative prompt has no effect.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import retrieve_timesteps

from tridentserve.parallel import ulysses
from tridentserve.pipelines.adapters.conditions import list_prompts, repeat_rows, split_rows
from tridentserve.pipelines.adapters.video_adapter import VideoAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs


class HunyuanVideoAdapter(VideoAdapter):
    """`HunyuanVideoPipeline`.

    Condition: prompt_embeds (1, 256, text dim) with prompt_attention_mask (1, 256), pooled_prompt_embeds (1, pooled
    dim). Latents: (num_outputs, channels, latent frames, height / 8, width / 8), in float32 before the first step.
    """

    family = "hunyuan_video"

    def _encode_key(self, inputs: GenerationInputs) -> Hashable:
        return None

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        embeds, pooled, mask = self.pipe.encode_prompt(prompt=list_prompts(batch), device=self.device)
        return split_rows(prompt_embeds=(embeds,), pooled_prompt_embeds=(pooled,), prompt_attention_mask=(mask,))

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        return {"latents": self._draw_noise(inputs, torch.float32, generator)}

    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        sigmas = np.linspace(1.0, 0.0, num_inference_steps + 1)[:-1]
        retrieve_timesteps(scheduler, num_inference_steps, self.device, sigmas=sigmas)
        scheduler.set_begin_index(0)

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        dtype = self._denoising_dtype
        names = ("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask")
        rows = {name: repeat_rows(tensors[name].to(dtype), num_outputs) for name in names}
        scale = values["guidance_scale"]
        rows["guidance"] = torch.full([1, num_outputs], scale, device=self.device, dtype=dtype) * 1000.0
        return rows

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        transformer = self.pipe.transformer
        with transformer.cache_context("cond"):
            noise: torch.Tensor = transformer(
                hidden_states=latents.to(transformer.dtype),
                timestep=timesteps.to(latents.dtype),
                encoder_hidden_states=rows["prompt_embeds"],
                encoder_attention_mask=rows["prompt_attention_mask"],
                pooled_projections=rows["pooled_prompt_embeds"],
                guidance=rows["guidance"],
                return_dict=False,
            )[0]
        return noise

    def _install_sequence_parallelism(self) -> None:
        transformer = self.pipe.transformer
        blocks = (*transformer.transformer_blocks, *transformer.single_transformer_blocks)
        ulysses.install_blocks(
            blocks[0],
            [block.attn for block in blocks],
            transformer.proj_out,
            text_first=False,
            positions=transformer.rope,
        )


ADAPTER = HunyuanVideoAdapter
