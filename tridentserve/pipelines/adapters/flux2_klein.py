"""FLUX.2 klein by Black Forest Labs: a Qwen3 reads the prompt, double and single stream blocks, a VAE.

Input images are optional. Their latents follow those of the output in D, with positions that tell them apart; each has
its own proportions and a megapixel at most. Distilled models (`is_distilled`) take no guidance.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from PIL import Image

from tridentserve.models.families import FAMILIES
from tridentserve.models.input_image import check_sides, open_input_images
from tridentserve.parallel import ulysses
from tridentserve.pipelines.adapters.conditions import list_negative_prompts, list_prompts, repeat_rows, split_rows
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.adapters.timestep_shift import set_shifted_timesteps
from tridentserve.pipelines.base import Tensors
from tridentserve.pipelines.reuse.block_cache import JoinedStream
from tridentserve.requests import GenerationInputs, Shape


class Flux2KleinAdapter(DiffusersAdapter):
    """`Flux2KleinPipeline`. With guidance, the condition has two rows: negative, then positive.

    Condition: prompt_embeds (rows, 512, 3 Qwen3 dims), text_ids (512, 4); with input images image_latents (1, tokens
    of all of them, 4 * channels), packed like the output's, input_ids (tokens, 4) and input_grid (images, 2).
    Latents: packed, (num_outputs, height / 16 * width / 16, 4 * channels).
    """

    family = "flux2_klein"
    passes_share_a_call = False

    def _encode_key(self, inputs: GenerationInputs) -> Hashable:
        return inputs.guidance_scale > 1 and not self.pipe.config.is_distilled

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        conditions = self._encode_prompts(batch)
        return [condition | self._encode_images(inputs) for condition, inputs in zip(conditions, batch, strict=True)]

    def _encode_images(self, inputs: GenerationInputs) -> Tensors:
        """Encode the input images: the tensors that they add to the condition, none without images."""
        images = [self._preprocess(image) for image in open_input_images(inputs)]
        if not images:
            return {}
        # This is the mode of the VAE's distribution, so nothing is drawn.
        latents, ids = self.pipe.prepare_image_latents(
            images, batch_size=1, generator=None, device=self.device, dtype=self.pipe.vae.dtype
        )
        grid = torch.tensor([image.shape[2:] for image in images]) // self.size_multiple
        return {"image_latents": latents.to(self._denoising_dtype), "input_ids": ids[0], "input_grid": grid}

    def _preprocess(self, image: Image.Image) -> torch.Tensor:
        """Scale and crop an input image as the stock pipeline does: (1, 3, height, width) from -1 to 1, in float32."""
        check_sides(FAMILIES[self.family], image)
        processor, multiple = self.pipe.image_processor, self.size_multiple
        scaled = processor._resize_if_exceeds_area(image)
        width, height = (side // multiple * multiple for side in scaled.size)
        pixels: torch.Tensor = processor.preprocess(scaled, height=height, width=width, resize_mode="crop")
        return pixels

    def _encode_prompts(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        """Encode the texts of the requests: the conditions without input images."""
        # Negative prompts and prompts take two calls, as in the stock pipeline.
        embeds, text_ids = self.pipe.encode_prompt(list_prompts(batch), device=self.device)
        negative_embeds = None
        if self._encode_key(batch[0]):
            negative_embeds, _ = self.pipe.encode_prompt(list_negative_prompts(batch), device=self.device)
        return [
            condition | {"text_ids": text_ids[0]} for condition in split_rows(prompt_embeds=(negative_embeds, embeds))
        ]

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        latents, output_ids = self._draw_packed_noise(inputs, condition["prompt_embeds"].dtype, generator)
        ids = [output_ids[0], condition.pop("input_ids")] if "input_ids" in condition else [output_ids[0]]
        return {"latents": latents, "image_ids": torch.cat(ids)}

    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        sigmas = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        own_sigmas = None if scheduler.config.get("use_flow_sigmas") else sigmas
        mu = compute_empirical_mu(latents.shape[1], num_inference_steps)
        set_shifted_timesteps(scheduler, num_inference_steps, self.device, own_sigmas, mu)

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        names = [name for name in ("prompt_embeds", "image_latents") if name in tensors]
        passes = len(tensors["prompt_embeds"])
        return {name: repeat_rows(tensors[name].expand(passes, -1, -1), num_outputs) for name in names}

    def _list_image_sizes(self, tensors: Tensors) -> Hashable:
        return tuple(map(tuple, tensors["input_grid"].tolist())) if "input_grid" in tensors else ()

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        transformer, own_tokens = self.pipe.transformer, latents.shape[1]
        if "image_latents" in rows:
            latents = torch.cat([latents, rows["image_latents"]], dim=1)
        with transformer.cache_context("cond"):
            noise: torch.Tensor = transformer(
                hidden_states=latents.to(transformer.dtype),
                timestep=timesteps.to(latents.dtype) / 1000,
                guidance=rows.get("guidance"),
                encoder_hidden_states=rows["prompt_embeds"],
                txt_ids=shared["text_ids"],
                img_ids=shared["image_ids"],
                return_dict=False,
            )[0]
        return noise[:, :own_tokens]

    def _find_joined_stream(self, tensors: Tensors) -> JoinedStream:
        return JoinedStream(len(tensors["image_ids"]), text_first=True)

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        rows = latents.transpose(1, 2).reshape(len(latents), -1, shape.height // 16, shape.width // 16)
        unpacked: torch.Tensor = self.pipe._unpatchify_latents(rows)
        return unpacked

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        # The VAE normalizes its latents, 2 by 2 of them together, by the statistics of a batch norm.
        norm, rows = self.pipe.vae.bn, self.pipe._patchify_latents(latents)
        mean = norm.running_mean.view(1, -1, 1, 1).to(rows.device, rows.dtype)
        std = torch.sqrt(norm.running_var.view(1, -1, 1, 1) + self.pipe.vae.config.batch_norm_eps)
        scaled = self.pipe._unpatchify_latents(rows * std.to(rows.device, rows.dtype) + mean)
        image: torch.Tensor = self.pipe.vae.decode(scaled, return_dict=False)[0]
        return image

    def _install_sequence_parallelism(self) -> None:
        transformer = self.pipe.transformer
        blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
        ulysses.install(
            transformer.x_embedder,
            [block.attn for block in blocks],
            transformer.proj_out,
            text_first=True,
            rotated=blocks,
        )


ADAPTER = Flux2KleinAdapter
