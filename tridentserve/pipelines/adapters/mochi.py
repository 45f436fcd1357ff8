"""Mochi 1 by Genmo: a T5, joint attention that leaves out the padding of the text, a causal 3-D VAE of factor 6.

Guidance and the scheduler compute in float32, as in the stock pipeline.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.mochi.pipeline_mochi import linear_quadratic_schedule, retrieve_timesteps

from tridentserve.errors import InvalidRequestError
from tridentserve.parallel import ulysses
from tridentserve.pipelines.adapters.conditions import list_negative_prompts, list_prompts, repeat_rows, split_rows
from tridentserve.pipelines.adapters.video_adapter import VideoAdapter, read_statistic
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs, Shape

_THRESHOLD_NOISE = 0.025


class MochiAdapter(VideoAdapter):
    """`MochiPipeline`. With guidance, the condition has two rows: negative, then positive.

    Condition: prompt_embeds (rows, 256, text dim) and prompt_attention_mask (rows, 256).
    Latents: (num_outputs, channels, latent frames, height / 8, width / 8).
    """

    family = "mochi"

    def _encode_key(self, inputs: GenerationInputs) -> Hashable:
        guided = inputs.guidance_scale > 1
        if not self.pipe.config.force_zeros_for_empty_prompt:
            return guided
        # The stock pipeline looks at the last of several prompts and then zeroes all of them or none.
        return guided, not inputs.prompt, guided and not inputs.negative_prompt

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        guided = batch[0].guidance_scale > 1
        embeds, mask, negative_embeds, negative_mask = self.pipe.encode_prompt(
            list_prompts(batch), list_negative_prompts(batch), do_classifier_free_guidance=guided, device=self.device
        )
        return split_rows(prompt_embeds=(negative_embeds, embeds), prompt_attention_mask=(negative_mask, mask))

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        return {"latents": self._draw_noise(inputs, condition["prompt_embeds"].dtype, generator)}

    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        if num_inference_steps < 2:
            raise InvalidRequestError("mochi needs at least 2 steps", "num_inference_steps")
        sigmas = np.array(linear_quadratic_schedule(num_inference_steps, _THRESHOLD_NOISE))
        retrieve_timesteps(scheduler, num_inference_steps, self.device, sigmas=sigmas)
        scheduler.set_begin_index(0)

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        return {name: repeat_rows(tensors[name], num_outputs) for name in ("prompt_embeds", "prompt_attention_mask")}

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        transformer = self.pipe.transformer
        with transformer.cache_context("cond_uncond"):
            noise: torch.Tensor = transformer(
                hidden_states=latents,
                encoder_hidden_states=rows["prompt_embeds"],
                timestep=timesteps.to(latents.dtype),
                encoder_attention_mask=rows["prompt_attention_mask"],
                return_dict=False,
            )[0]
        return noise.float()

    def _call_scheduler(
        self,
        scheduler: Any,
        noise: torch.Tensor,
        timestep: torch.Tensor,
        latents: torch.Tensor,
        tensors: Tensors,
        **arguments: Any,
    ) -> torch.Tensor:
        stepped = super()._call_scheduler(scheduler, noise, timestep, latents.float(), tensors, **arguments)
        return stepped.to(latents.dtype)

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        vae = self.pipe.vae
        scaling_factor = vae.config.scaling_factor
        if vae.config.latents_mean is None or vae.config.latents_std is None:
            scaled: torch.Tensor = latents / scaling_factor
        else:
            std, mean = read_statistic(vae, "latents_std", latents), read_statistic(vae, "latents_mean", latents)
            scaled = latents * std / scaling_factor + mean
        return scaled

    def _install_sequence_parallelism(self) -> None:
        transformer = self.pipe.transformer
        blocks = transformer.transformer_blocks
        ulysses.install_blocks(
            blocks[0],
            [block.attn1 for block in blocks],
            transformer.proj_out,
            text_first=False,
            positions=transformer.rope,
            call_per_sample=True,
        )


ADAPTER = MochiAdapter
