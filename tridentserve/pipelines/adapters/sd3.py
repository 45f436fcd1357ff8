"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206): two CLIPs and a T5, an MMDiT with classifier-free guidance, a VAE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import retrieve_timesteps

from tridentserve.parallel import ulysses
from tridentserve.pipelines.adapters.bricked_sequence import lay_out
from tridentserve.pipelines.adapters.conditions import list_negative_prompts, list_prompts, repeat_rows, split_rows
from tridentserve.pipelines.adapters.image_start import ImageStartAdapter
from tridentserve.pipelines.adapters.packed_sequence import (
    NoiseCall,
    PackingAdapter,
    install_attention,
    install_joint_blocks,
    install_modulation,
    unpack_patches,
)
from tridentserve.pipelines.adapters.timestep_shift import compute_shift_mu
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs, Shape

# The default of `StableDiffusion3Pipeline`'s `max_sequence_length`.
_T5_TOKENS = 256


class SD3Adapter(PackingAdapter, ImageStartAdapter):
    """`StableDiffusion3Pipeline`, and its image-to-image and inpainting pipelines. With guidance, the condition has two
    rows: negative, then positive.

    Condition: prompt_embeds (rows, 77 + T5 tokens, joint dim) and pooled_prompt_embeds (rows, pooled dim).
    Latents: (num_outputs, channels, height / 8, width / 8).
    """

    family = "sd3"

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        embeds, negative_embeds, pooled, negative_pooled = self.pipe.encode_prompt(
            prompt=list_prompts(batch),
            prompt_2=None,
            prompt_3=None,
            negative_prompt=list_negative_prompts(batch),
            do_classifier_free_guidance=batch[0].guidance_scale > 1,
            device=self.device,
            max_sequence_length=self._count_t5_tokens(),
        )
        return split_rows(prompt_embeds=(negative_embeds, embeds), pooled_prompt_embeds=(negative_pooled, pooled))

    def _count_t5_tokens(self) -> int:
        """Count the T5 tokens of a prompt: the stock pipeline's 256, or fewer where the tokenizer has been made for
        fewer, as the shipped model's."""
        tokenizer = self.pipe.tokenizer_3
        return _T5_TOKENS if tokenizer is None else min(_T5_TOKENS, tokenizer.model_max_length)

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
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
            kwargs["mu"] = compute_shift_mu(scheduler.config, tokens, max_shift=1.16)
        retrieve_timesteps(scheduler, num_inference_steps, self.device, **kwargs)

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        return {name: repeat_rows(tensors[name], num_outputs) for name in ("prompt_embeds", "pooled_prompt_embeds")}

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        noise: torch.Tensor = self.pipe.transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=rows["prompt_embeds"],
            pooled_projections=rows["pooled_prompt_embeds"],
            return_dict=False,
        )[0]
        return noise

    def _predict_noises(self, calls: Sequence[NoiseCall]) -> list[torch.Tensor]:
        transformer = self.pipe.transformer
        images = [transformer.pos_embed(call.latents) for call in calls]
        texts = [call.rows["prompt_embeds"] for call in calls]
        pooled = torch.cat([call.rows["pooled_prompt_embeds"] for call in calls])
        levels = transformer.time_text_embed(torch.cat([call.timesteps for call in calls]), pooled)
        sequence = lay_out([each.shape for each in images], [each.shape for each in texts], text_first=False)
        with sequence.active():
            image, text = sequence.pack_images(images), transformer.context_embedder(sequence.pack_texts(texts))
            for block in transformer.transformer_blocks:
                text, image = block(hidden_states=image, encoder_hidden_states=text, temb=levels)
            noises = sequence.unpack_images(transformer.proj_out(transformer.norm_out(image, levels)))
        patch = [transformer.config.patch_size] * 2
        return [unpack_patches(noise, call.latents.shape[2:], patch) for noise, call in zip(noises, calls, strict=True)]

    def _install_packing(self) -> None:
        transformer = self.pipe.transformer
        install_joint_blocks(transformer.transformer_blocks)
        for block in transformer.transformer_blocks:
            if block.attn2 is not None:
                install_attention(block.attn2, "image", "image")
        install_modulation(transformer.norm_out.linear, "image")

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        return latents

    def _decode_outputs(self, latents: torch.Tensor, inputs: GenerationInputs) -> torch.Tensor:
        if inputs.start is None or not inputs.start.has_mask:
            return super()._decode_outputs(latents, inputs)
        # The stock inpainting pipeline takes the latents' shift for 0 here, and nowhere else.
        image: torch.Tensor = self.pipe.vae.decode(latents / self.pipe.vae.config.scaling_factor, return_dict=False)[0]
        return image

    def _install_sequence_parallelism(self) -> None:
        transformer = self.pipe.transformer
        blocks = transformer.transformer_blocks
        attentions = [attention for block in blocks for attention in (block.attn, block.attn2) if attention is not None]
        ulysses.install(
            transformer.pos_embed,
            attentions,
            transformer.proj_out,
            text_first=False,
        )


ADAPTER = SD3Adapter
