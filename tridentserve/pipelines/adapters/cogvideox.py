"""CogVideoX 1.0 and 1.5 (arXiv 2408.06072): a T5, joint attention over text and frames, a causal 3-D VAE.

The DPM scheduler of the 5B models takes its last prediction as an argument of each step; DDIM does not. Version 1.5
embeds latent frames in pairs and pads them in front to an even number. The VAE decodes an odd number of latent frames
exactly, but makes three frames too many of an even number, so videos have 8k + 1 frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import CogVideoXDPMScheduler, CogVideoXPipeline

from tridentserve.parallel import ulysses
from tridentserve.pipelines.adapters.conditions import list_negative_prompts, list_prompts, repeat_rows, split_rows
from tridentserve.pipelines.adapters.video_adapter import VideoAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs, Shape

# The prediction that the DPM scheduler takes at the next step.
_PREDICTION = "old_pred_original_sample"


class CogVideoXAdapter(VideoAdapter):
    """`CogVideoXPipeline`. With guidance, the condition has two rows: negative, then positive.

    Condition: prompt_embeds (rows, 226, text dim).
    Latents: frames first, (num_outputs, latent frames with padding, channels, height / 8, width / 8).
    """

    family = "cogvideox"

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        guided = batch[0].guidance_scale > 1
        embeds, negative_embeds = self.pipe.encode_prompt(
            list_prompts(batch), list_negative_prompts(batch), do_classifier_free_guidance=guided, device=self.device
        )
        return split_rows(prompt_embeds=(negative_embeds, embeds))

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        shape = inputs.shape
        num_frames = shape.num_frames + self._count_padding(shape) * self.pipe.vae_scale_factor_temporal
        # The method is called by its class, since the pipeline with an input image has another method of this name.
        latents = CogVideoXPipeline.prepare_latents(
            self.pipe,
            inputs.num_outputs,
            self.pipe.transformer.config.out_channels,
            num_frames,
            shape.height,
            shape.width,
            condition["prompt_embeds"].dtype,
            self.device,
            generator,
        )
        return {"latents": latents}

    def _count_padding(self, shape: Shape) -> int:
        """The number of latent frames to add, so that all of them are a multiple of the temporal patch."""
        latent_frames = (shape.num_frames - 1) // self.pipe.vae_scale_factor_temporal + 1
        patch_frames: int = self.pipe.transformer.config.patch_size_t or 1
        return int(-latent_frames % patch_frames)

    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        scheduler.set_timesteps(num_inference_steps, device=self.device)

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        return {"prompt_embeds": repeat_rows(tensors["prompt_embeds"], num_outputs)}

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        transformer = self.pipe.transformer
        # Version 1.5 with an input image embeds an offset, which is always this number.
        offset = None if transformer.config.ofs_embed_dim is None else latents.new_full((1,), 2.0)
        with transformer.cache_context("cond_uncond"):
            noise: torch.Tensor = transformer(
                hidden_states=latents,
                encoder_hidden_states=rows["prompt_embeds"],
                timestep=timesteps,
                ofs=offset,
                image_rotary_emb=self._make_rotary_tables(latents),
                return_dict=False,
            )[0]
        return noise.float()

    def _make_rotary_tables(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosines and sines of the image tokens, (tokens, head dim) each, or None for the 2B model, which has none."""
        if not self.pipe.transformer.config.use_rotary_positional_embeddings:
            return None
        frames, _, height, width = latents.shape[1:]
        factor = self.pipe.vae_scale_factor_spatial
        cos, sin = self.pipe._prepare_rotary_positional_embeddings(
            height * factor, width * factor, frames, latents.device
        )
        return ulysses.share(cos), ulysses.share(sin)

    def _call_scheduler(
        self,
        scheduler: Any,
        noise: torch.Tensor,
        timestep: torch.Tensor,
        latents: torch.Tensor,
        tensors: Tensors,
        **arguments: Any,
    ) -> torch.Tensor:
        if isinstance(scheduler, CogVideoXDPMScheduler):
            before = scheduler.timesteps[scheduler.timesteps > timestep]
            last = before[-1] if len(before) else None
            stepped, tensors[_PREDICTION] = scheduler.step(
                noise, tensors.get(_PREDICTION), timestep, last, latents, return_dict=False, **arguments
            )
        else:
            stepped = super()._call_scheduler(scheduler, noise, timestep, latents, tensors, **arguments)
        return stepped.to(latents.dtype)  # type: ignore[no-any-return]

    def _select_frame(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        return latents[:, (latents.shape[1] + self._count_padding(shape)) // 2]

    def _make_video(self, latents: torch.Tensor) -> torch.Tensor:
        return latents[:, None].expand(-1, 1 + self._count_padding(Shape(0, 0)), -1, -1, -1)

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        channels_first = latents[:, self._count_padding(shape) :].permute(0, 2, 1, 3, 4)
        scaled: torch.Tensor = 1 / self.pipe.vae_scaling_factor_image * channels_first
        return scaled

    def _install_sequence_parallelism(self) -> None:
        transformer = self.pipe.transformer
        blocks = transformer.transformer_blocks
        ulysses.install_blocks(
            blocks[0],
            [block.attn1 for block in blocks],
            transformer.proj_out,
            text_first=True,
        )


ADAPTER = CogVideoXAdapter
