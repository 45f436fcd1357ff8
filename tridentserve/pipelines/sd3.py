"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206): two CLIPs and a T5, an MMDiT with classifier-free guidance, a VAE."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import retrieve_timesteps

from tridentserve.parallel import ulysses
from tridentserve.pipelines.base import Tensors
from tridentserve.pipelines.diffusers_adapter import DiffusersAdapter, per_output, shift_mu
from tridentserve.requests import GenerationInputs, Shape


class SD3Adapter(DiffusersAdapter):
    """`StableDiffusion3Pipeline`. With guidance, the condition has two rows: negative, then positive.

    Condition: prompt_embeds (rows, 77 + T5 tokens, joint dim) and pooled_prompt_embeds (rows, pooled dim).
    Latents: (num_outputs, channels, height / 8, width / 8).
    """

    family = "sd3"

    def _encode(self, inputs: GenerationInputs) -> Tensors:
        guided = inputs.guidance_scale > 1
        embeds, negative_embeds, pooled, negative_pooled = self.pipe.encode_prompt(
            prompt=inputs.prompt,
            prompt_2=None,
            prompt_3=None,
            negative_prompt=inputs.negative_prompt,
            do_classifier_free_guidance=guided,
            device=self.device,
        )
        if guided:
            embeds = torch.cat([negative_embeds, embeds], dim=0)
            pooled = torch.cat([negative_pooled, pooled], dim=0)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def _initial_tensors(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        latents = self.pipe.prepare_latents(
            inputs.num_outputs,
            self.pipe.transformer.config.in_channels,
            inputs.shape.height,
            inputs.shape.width,
            condition["prompt_embeds"].dtype,
            self.device,
            generator,
        )
        return {"latents": latents}

    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        kwargs = {}
        if scheduler.config.get("use_dynamic_shifting"):
            patch = self.pipe.transformer.config.patch_size
            tokens = (latents.shape[-2] // patch) * (latents.shape[-1] // patch)
            kwargs["mu"] = shift_mu(scheduler.config, tokens, max_shift=1.16)
        retrieve_timesteps(scheduler, num_inference_steps, self.device, **kwargs)

    def _predict_noise(
        self, latents: torch.Tensor, timestep: torch.Tensor, tensors: Tensors, values: dict[str, Any]
    ) -> torch.Tensor:
        embeds, pooled = tensors["prompt_embeds"], tensors["pooled_prompt_embeds"]
        guided = embeds.shape[0] == 2
        hidden_states = torch.cat([latents] * 2) if guided else latents
        noise: torch.Tensor = self.pipe.transformer(
            hidden_states=hidden_states,
            timestep=timestep.expand(hidden_states.shape[0]),
            encoder_hidden_states=per_output(embeds, latents.shape[0]),
            pooled_projections=per_output(pooled, latents.shape[0]),
            return_dict=False,
        )[0]
        if not guided:
            return noise
        unconditional, conditional = noise.chunk(2)
        scale: float = values["guidance_scale"]
        return unconditional + scale * (conditional - unconditional)

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        return latents

    def _install_sequence_parallelism(self) -> None:
        transformer = self.pipe.transformer
        blocks = transformer.transformer_blocks
        attentions = [attention for block in blocks for attention in (block.attn, block.attn2) if attention is not None]
        ulysses.install(
            transformer.pos_embed,
            attentions,
            transformer.proj_out,
            num_heads=transformer.config.num_attention_heads,
            text_first=False,
        )


ADAPTER = SD3Adapter
