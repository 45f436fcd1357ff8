"""FLUX.1 by Black Forest Labs: a CLIP and a T5, double and single stream blocks with rotary positions, a VAE.

Guidance is an embedding (dev) or absent (schnell), so each output has one row and a negative prompt has no effect.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from tridentserve.parallel import ulysses
from tridentserve.pipelines.adapters.bricked_sequence import lay_out
from tridentserve.pipelines.adapters.conditions import list_prompts, repeat_rows, split_rows
from tridentserve.pipelines.adapters.image_start import ImageStartAdapter
from tridentserve.pipelines.adapters.packed_sequence import (
    NoiseCall,
    PackingAdapter,
    install_attention,
    install_joint_blocks,
    install_modulation,
)
from tridentserve.pipelines.adapters.timestep_shift import compute_shift_mu, set_shifted_timesteps
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs, Shape


class FluxAdapter(PackingAdapter, ImageStartAdapter):
    """`FluxPipeline`, and its image-to-image and inpainting pipelines.

    Condition: prompt_embeds (1, T5 tokens, joint dim), pooled_prompt_embeds (1, pooled dim), text_ids (T5 tokens, 3).
    Latents: packed, (num_outputs, height / 16 * width / 16, 4 * channels).
    """

    family = "flux"

    def _encode_key(self, inputs: GenerationInputs) -> Hashable:
        return None

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        embeds, pooled, text_ids = self.pipe.encode_prompt(prompt=list_prompts(batch), device=self.device)
        conditions = split_rows(prompt_embeds=(embeds,), pooled_prompt_embeds=(pooled,))
        return [condition | {"text_ids": text_ids} for condition in conditions]

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        latents, image_ids = self._draw_packed_noise(inputs, condition["prompt_embeds"].dtype, generator)
        return {"latents": latents, "image_ids": image_ids}

    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        sigmas = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        own_sigmas = None if scheduler.config.get("use_flow_sigmas") else sigmas
        mu = compute_shift_mu(scheduler.config, latents.shape[1], max_shift=1.15)
        set_shifted_timesteps(scheduler, num_inference_steps, self.device, own_sigmas, mu)

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        rows = {name: repeat_rows(tensors[name], num_outputs) for name in ("prompt_embeds", "pooled_prompt_embeds")}
        if self.pipe.transformer.config.guidance_embeds:
            scale = values["guidance_scale"]
            rows["guidance"] = torch.full([1, num_outputs], scale, device=self.device, dtype=torch.float32)
        return rows

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        transformer = self.pipe.transformer
        with transformer.cache_context("cond"):
            noise: torch.Tensor = transformer(
                hidden_states=latents,
                timestep=timesteps.to(latents.dtype) / 1000,
                guidance=rows.get("guidance"),
                pooled_projections=rows["pooled_prompt_embeds"],
                encoder_hidden_states=rows["prompt_embeds"],
                txt_ids=shared["text_ids"],
                img_ids=shared["image_ids"],
                return_dict=False,
            )[0]
        return noise

    def _predict_noises(self, calls: Sequence[NoiseCall]) -> list[torch.Tensor]:
        transformer = self.pipe.transformer
        images, texts = [call.latents for call in calls], [call.rows["prompt_embeds"] for call in calls]
        levels = self._embed_levels(calls)
        sequence = lay_out([each.shape for each in images], [each.shape for each in texts], text_first=True)
        text_ids, image_ids = (
            [call.shared[name].expand(len(call.latents), -1, -1) for call in calls]
            for name in ("text_ids", "image_ids")
        )
        ids = torch.cat([sequence.pack_texts(text_ids), sequence.pack_images(image_ids)])
        positions = transformer.pos_embed(ids[:, 0])
        with sequence.active():
            image = transformer.x_embedder(sequence.pack_images(images))
            text = transformer.context_embedder(sequence.pack_texts(texts))
            for block in transformer.transformer_blocks:
                text, image = block(image, text, levels, positions)
            joint = torch.cat([text, image])
            for block in transformer.single_transformer_blocks:
                # A block puts its text before its image, token by token here, so that there is none apart.
                _, joint = block(joint, joint[:, :0], levels, positions)
            image = joint[len(text) :]
            return sequence.unpack_images(transformer.proj_out(transformer.norm_out(image, levels)))

    def _embed_levels(self, calls: Sequence[NoiseCall]) -> torch.Tensor:
        """Embed what modulates the rows of all calls, as the stock transformer does."""
        levels, format_ = torch.cat([call.timesteps for call in calls]), calls[0].latents.dtype
        inputs = [levels.to(format_) / 1000 * 1000]
        if "guidance" in calls[0].rows:
            inputs.append(torch.cat([call.rows["guidance"] for call in calls]).to(format_) * 1000)
        pooled = torch.cat([call.rows["pooled_prompt_embeds"] for call in calls])
        embedded: torch.Tensor = self.pipe.transformer.time_text_embed(*inputs, pooled)
        return embedded

    def _install_packing(self) -> None:
        transformer = self.pipe.transformer
        install_joint_blocks(transformer.transformer_blocks)
        for block in transformer.single_transformer_blocks:
            install_attention(block.attn, "joint", "joint")
            install_modulation(block.norm.linear, "joint")
        install_modulation(transformer.norm_out.linear, "image")

    def _pack_start(self, latents: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = self.pipe._pack_latents(latents, *latents.shape)
        return packed

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        unpacked: torch.Tensor = self.pipe._unpack_latents(
            latents, shape.height, shape.width, self.pipe.vae_scale_factor
        )
        return unpacked

    def _install_sequence_parallelism(self) -> None:
        transformer = self.pipe.transformer
        ulysses.install(
            transformer.x_embedder,
            [block.attn for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks)],
            transformer.proj_out,
            text_first=True,
            positions=transformer.pos_embed,
        )


ADAPTER = FluxAdapter
