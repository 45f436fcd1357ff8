"""Wan 2.1 and 2.2 (arXiv 2503.20314): a UMT5, self-attention over frames, cross-attention to text, a causal 3-D VAE.

Wan 2.2 A14B has two transformers, one for the noisy first steps and one for the other steps. Wan 2.2 TI2V-5B has a
timestep for each token and a VAE of factor 16. The published schedulers are UniPC and flow matching.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tridentserve.parallel import ulysses
from tridentserve.pipelines.adapters.bricked_sequence import lay_out
from tridentserve.pipelines.adapters.conditions import list_negative_prompts, list_prompts, repeat_rows, split_rows
from tridentserve.pipelines.adapters.packed_sequence import (
    NoiseCall,
    PackingAdapter,
    install_attention,
    unpack_patches,
)
from tridentserve.pipelines.adapters.video_adapter import VideoAdapter, read_statistic
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs, Shape


class WanAdapter(PackingAdapter, VideoAdapter):
    """`WanPipeline`. With guidance, the condition has two rows: negative, then positive.

    Condition: prompt_embeds (rows, 512, text dim). Latents: (num_outputs, channels, latent frames, height / 8, width
    / 8), in float32.
    """

    family = "wan"
    passes_share_a_call = False

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        embeds, negative_embeds = self.pipe.encode_prompt(
            list_prompts(batch),
            list_negative_prompts(batch),
            do_classifier_free_guidance=batch[0].guidance_scale > 1,
            max_sequence_length=512,
            device=self.device,
        )
        return split_rows(prompt_embeds=(negative_embeds, embeds))

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        return {"latents": self._draw_noise(inputs, torch.float32, generator)}

    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        scheduler.set_timesteps(num_inference_steps, device=self.device)
        scheduler.set_begin_index(0)

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        return {"prompt_embeds": repeat_rows(tensors["prompt_embeds"], num_outputs)}

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        if self.pipe.config.boundary_ratio is None:
            return self._run(self.pipe.transformer, latents, timesteps, rows)
        noisy = self._is_noisy(timesteps)
        if bool(noisy.all()):
            return self._run(self.pipe.transformer, latents, timesteps, rows)
        if not bool(noisy.any()):
            return self._run(self.pipe.transformer_2, latents, timesteps, rows)
        noise = torch.empty_like(latents, dtype=self._denoising_dtype)
        for model, mine in ((self.pipe.transformer, noisy), (self.pipe.transformer_2, ~noisy)):
            theirs = {name: row[mine] for name, row in rows.items()}
            noise[mine] = self._run(model, latents[mine], timesteps[mine], theirs)
        return noise

    def _predict_noises(self, calls: Sequence[NoiseCall]) -> list[torch.Tensor]:
        noises: dict[int, torch.Tensor] = {}
        models = [self._choose_transformer(call.timesteps) for call in calls]
        for model in (self.pipe.transformer, self.pipe.transformer_2):
            mine = [index for index, chosen in enumerate(models) if chosen is model]
            if mine:
                noises.update(zip(mine, self._run_packed(model, [calls[index] for index in mine]), strict=True))
        return [noises[index] for index in range(len(calls))]

    def _choose_transformer(self, timesteps: torch.Tensor) -> Any:
        """Choose the transformer for one request's timesteps."""
        is_second = self.pipe.config.boundary_ratio is not None and not bool(self._is_noisy(timesteps).all())
        return self.pipe.transformer_2 if is_second else self.pipe.transformer

    def _run_packed(self, transformer: Any, calls: Sequence[NoiseCall]) -> list[torch.Tensor]:
        inputs = [self._build_model_input(call.latents, call.rows).to(transformer.dtype) for call in calls]
        images = [transformer.patch_embedding(each).flatten(2).transpose(1, 2) for each in inputs]
        texts = [call.rows["prompt_embeds"] for call in calls]
        sequence = lay_out([each.shape for each in images], [each.shape for each in texts], text_first=False)
        timesteps = [self._expand_timesteps(call.timesteps, call.latents, transformer) for call in calls]
        if self.pipe.config.expand_timesteps:
            of_all = sequence.pack_images([each.unsqueeze(-1) for each in timesteps]).flatten()
        else:
            of_all = torch.cat(timesteps)
        levels, modulation, text, _ = transformer.condition_embedder(of_all, sequence.pack_texts(texts))
        modulation = modulation.unflatten(1, (6, -1))
        if not self.pipe.config.expand_timesteps:
            levels, modulation = (sequence.spread(each, "image") for each in (levels, modulation))
        positions = [
            sequence.pack_images(
                [table[:, :, 0].expand(len(each), -1, -1) for table, each in zip(tables, inputs, strict=True)]
            ).transpose(0, 1)[:, :, None]
            for tables in zip(*map(transformer.rope, inputs), strict=True)
        ]
        with sequence.active():
            image = sequence.pack_images(images)
            for block in transformer.blocks:
                image = block(image, text, modulation, positions)
        shift, scale = (transformer.scale_shift_table + levels.unsqueeze(1)).chunk(2, dim=1)
        image = (transformer.norm_out(image.float()) * (1 + scale) + shift).type_as(image)
        noises = sequence.unpack_images(transformer.proj_out(image))
        patch = transformer.config.patch_size
        return [unpack_patches(noise, call.latents.shape[2:], patch) for noise, call in zip(noises, calls, strict=True)]

    def _install_packing(self) -> None:
        for transformer in (self.pipe.transformer, self.pipe.transformer_2):
            for block in transformer.blocks if transformer is not None else ():
                install_attention(block.attn1, "image", "image")
                install_attention(block.attn2, "image", "text")

    def _is_noisy(self, timesteps: torch.Tensor) -> torch.Tensor:
        """Compare timesteps with the boundary between the two transformers."""
        boundary = self.pipe.config.boundary_ratio * self.pipe.scheduler.config.num_train_timesteps
        noisy: torch.Tensor = timesteps >= boundary
        return noisy

    def _apply_guidance(self, noise: torch.Tensor, values: dict[str, Any], timestep: torch.Tensor) -> torch.Tensor:
        second = values["guidance_scale_2"] if self.pipe.config.boundary_ratio is not None else None
        if second is not None and not bool(self._is_noisy(timestep)):
            values = values | {"guidance_scale": second}
        return super()._apply_guidance(noise, values, timestep)

    def _run(self, transformer: Any, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors) -> torch.Tensor:
        if self.pipe.config.expand_timesteps:
            timesteps = ulysses.share(self._expand_timesteps(timesteps, latents, transformer), dim=1)
        with transformer.cache_context("cond"):
            noise: torch.Tensor = transformer(
                hidden_states=self._build_model_input(latents, rows).to(transformer.dtype),
                timestep=timesteps,
                encoder_hidden_states=rows["prompt_embeds"],
                encoder_hidden_states_image=rows.get("image_embeds"),
                return_dict=False,
            )[0]
        return noise

    def _expand_timesteps(self, timesteps: torch.Tensor, latents: torch.Tensor, transformer: Any) -> torch.Tensor:
        """Expand timesteps to each image token, (rows, tokens), where each has its own timestep."""
        if not self.pipe.config.expand_timesteps:
            return timesteps
        _, patch_height, patch_width = transformer.config.patch_size
        frames, height, width = latents.shape[2:]
        tokens = (height // patch_height) * (width // patch_width)
        return self._expand_by_frame(timesteps, frames).repeat_interleave(tokens, dim=1)

    def _expand_by_frame(self, timesteps: torch.Tensor, frames: int) -> torch.Tensor:
        """Expand timesteps to each latent frame, (rows, frames), where each token has its own timestep."""
        return timesteps[:, None].expand(-1, frames)

    def _build_model_input(self, latents: torch.Tensor, rows: Tensors) -> torch.Tensor:
        """Build the channels that a transformer takes, of the latents and of the other rows."""
        return latents

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        vae = self.pipe.vae
        std, mean = read_statistic(vae, "latents_std", latents), read_statistic(vae, "latents_mean", latents)
        return latents / (1.0 / std) + mean

    def _list_cached_blocks(self) -> list[torch.nn.Module]:
        # One transformer cannot take over what the blocks of the other found.
        return [] if self.pipe.transformer_2 is not None else super()._list_cached_blocks()

    def _install_sequence_parallelism(self) -> None:
        for transformer in (self.pipe.transformer, self.pipe.transformer_2):
            if transformer is not None:
                ulysses.install_blocks(
                    transformer.blocks[0],
                    [block.attn1 for block in transformer.blocks],
                    transformer.proj_out,
                    text_first=False,
                    positions=transformer.rope,
                    positions_dim=1,
                )


ADAPTER = WanAdapter
