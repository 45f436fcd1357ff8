"""HunyuanVideo 1.5 (arXiv 2511.18870): a Qwen2.5-VL reads the prompt and a ByT5 the text quoted in it; double stream
blocks over the frames and all text; a causal 3-D VAE of factor 16.

The adapter makes videos from text: the tokens and channels of a first image are zeros. The stock pipeline takes its
guidance scale from the model folder's `guider`; here the request states it. Distilled models, whose guider is off, take
no guidance.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import retrieve_timesteps

from tridentserve.errors import ModelFolderError
from tridentserve.parallel import ulysses
from tridentserve.pipelines.adapters.conditions import list_negative_prompts, list_prompts, repeat_rows, split_rows
from tridentserve.pipelines.adapters.video_adapter import VideoAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

# Their names in the condition, in the order in which the stock pipeline returns them.
_TEXTS = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2")
# `_apply_guidance` computes what a guider with these settings does, and nothing else.
_PLAIN_GUIDANCE = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}


class HunyuanVideo15Adapter(VideoAdapter):
    """`HunyuanVideo15Pipeline`. With guidance, the condition has two rows: negative, then positive.

    Condition: prompt_embeds (rows, 1000, Qwen dim) and prompt_embeds_2 (rows, 256, ByT5 dim), each with a mask (rows,
    tokens). Latents: (num_outputs, channels, latent frames, height / 16, width / 16).
    """

    family = "hunyuan_video_15"
    passes_share_a_call = False

    def __init__(self, pipe: Any, stages: frozenset[Stage], device: torch.device) -> None:
        super().__init__(pipe, stages, device)
        if Stage.ENCODE in stages:
            _check_guider(pipe.guider)
        if Stage.DECODE in stages:
            # The VAE's attention takes one video at a time.
            pipe.vae.use_slicing = True

    def _encode_key(self, inputs: GenerationInputs) -> Hashable:
        guider = self.pipe.guider
        distilled = not guider.config.enabled or math.isclose(guider.config.guidance_scale, 1.0)
        return not distilled and not math.isclose(inputs.guidance_scale, 1.0)

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        # Negative prompts and prompts take two calls, as in the stock pipeline.
        positive = self._encode_texts(list_prompts(batch))
        negative: Sequence[torch.Tensor | None] = [None] * len(_TEXTS)
        if self._encode_key(batch[0]):
            negative = self._encode_texts(list_negative_prompts(batch))
        return split_rows(**dict(zip(_TEXTS, zip(negative, positive, strict=True), strict=True)))

    def _encode_texts(self, texts: list[str]) -> Sequence[torch.Tensor]:
        encoded: Sequence[torch.Tensor] = self.pipe.encode_prompt(
            prompt=texts, batch_size=len(texts), device=self.device, dtype=self._denoising_dtype
        )
        return encoded

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        return {"latents": self._draw_noise(inputs, self._denoising_dtype, generator)}

    def _count_channels(self) -> int:
        channels: int = self.pipe.num_channels_latents  # The transformer's input has those of a first image too.
        return channels

    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        sigmas = np.linspace(1.0, 0.0, num_inference_steps + 1)[:-1]
        retrieve_timesteps(scheduler, num_inference_steps, self.device, sigmas=sigmas)

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        return {name: repeat_rows(tensors[name], num_outputs) for name in _TEXTS}

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        transformer = self.pipe.transformer
        image_latents, given, image_embeds = self._make_first_image(latents, rows)
        with transformer.cache_context("cond"):
            noise: torch.Tensor = transformer(
                hidden_states=torch.cat([latents, image_latents, given], dim=1),
                image_embeds=image_embeds,
                timestep=timesteps.to(latents.dtype),
                encoder_hidden_states=rows["prompt_embeds"],
                encoder_attention_mask=rows["prompt_embeds_mask"],
                encoder_hidden_states_2=rows["prompt_embeds_2"],
                encoder_attention_mask_2=rows["prompt_embeds_mask_2"],
                return_dict=False,
            )[0]
        return noise

    def _make_first_image(
        self, latents: torch.Tensor, rows: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Latents of a first image in the shape of the output's, a mask of the frames that it determines, (rows, 1,
        frames, height, width), and its tokens from an image encoder: all zeros, since there is no image."""
        dtype = self._denoising_dtype
        image_latents, given = self.pipe.prepare_cond_latents_and_mask(latents, dtype, self.device)
        tokens = (len(latents), self.pipe.vision_num_semantic_tokens, self.pipe.vision_states_dim)
        return image_latents, given, torch.zeros(tokens, dtype=dtype, device=self.device)

    def _install_sequence_parallelism(self) -> None:
        transformer = self.pipe.transformer
        blocks = transformer.transformer_blocks
        ulysses.install_blocks(
            blocks[0],
            [block.attn for block in blocks],
            transformer.proj_out,
            text_first=False,
            positions=transformer.rope,
        )


def _check_guider(guider: Any) -> None:
    """Raises `ModelFolderError` for guidance other than the plain classifier-free one."""
    name = type(guider).__name__
    other = {key: guider.config.get(key) for key, plain in _PLAIN_GUIDANCE.items() if guider.config.get(key) != plain}
    if name != "ClassifierFreeGuidance" or other:
        raise ModelFolderError(
            f"guider is a {name} ({other}), and only a ClassifierFreeGuidance with {_PLAIN_GUIDANCE} is served"
        )


ADAPTER = HunyuanVideo15Adapter
