"""Stable Diffusion XL (arXiv 2307.01952): two CLIPs, a U-Net that takes the size of the image as input, a VAE.

A U-Net mixes pixels by convolutions, so its tokens cannot be shared out: two workers run one of its two passes
each. Requests of different sizes share steps as patches. No watermark is added.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from tridentserve.models.step_cache import count_patch_numbers
from tridentserve.parallel.ulysses import get_current_group
from tridentserve.pipelines.adapters.conditions import list_negative_prompts, list_prompts, repeat_rows, split_rows
from tridentserve.pipelines.adapters.ddpm_adapter import DDPMAdapter
from tridentserve.pipelines.adapters.denoising_request import DenoisingRequest
from tridentserve.pipelines.adapters.image_start import ImageStartAdapter
from tridentserve.pipelines.adapters.packed_sequence import NoiseCall, PackingAdapter
from tridentserve.pipelines.adapters.patch_caches import PatchCaches
from tridentserve.pipelines.adapters.patched_unet import (
    LatentSize,
    PatchLayout,
    find_least_side,
    install_patches,
    order_by_size,
)
from tridentserve.pipelines.adapters.step_caches import may_skip
from tridentserve.pipelines.base import DenoisingState, Tensors
from tridentserve.pipelines.reuse.patch_pass import install_reuse, list_stacks
from tridentserve.pipelines.reuse.predictor import load_predictor
from tridentserve.requests import GenerationInputs, ImageStart, Quality

_ROWS = ("prompt_embeds", "pooled_prompt_embeds", "time_ids")


class SDXLAdapter(ImageStartAdapter, PackingAdapter, DDPMAdapter):
    """`StableDiffusionXLPipeline`, and its image-to-image and inpainting pipelines. With guidance, the condition has
    two rows: negative, then positive. Without a negative prompt the negative row is zeros, as in the published models.

    Condition: prompt_embeds (rows, 77, both dims) and pooled_prompt_embeds (rows, pooled dim).
    """

    family = "sdxl"
    denoiser = "unet"
    packs_caches = True

    def read_predictor(self, folder: Path) -> None:
        self._predictor = load_predictor(folder, self.family)

    def _encode_key(self, inputs: GenerationInputs) -> Hashable:
        return inputs.guidance_scale > 1, not inputs.negative_prompt

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        embeds, negative_embeds, pooled, negative_pooled = self.pipe.encode_prompt(
            list_prompts(batch),
            device=self.device,
            do_classifier_free_guidance=batch[0].guidance_scale > 1 and self._guidance_dim is None,
            negative_prompt=list_negative_prompts(batch) if batch[0].negative_prompt else None,
        )
        return split_rows(prompt_embeds=(negative_embeds, embeds), pooled_prompt_embeds=(negative_pooled, pooled))

    @property
    def _guidance_dim(self) -> int | None:
        """The size of the guidance embedding of latent consistency models (arXiv 2310.04378). Other models have
        None."""
        dim: int | None = self.pipe.unet.config.time_cond_proj_dim
        return dim

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        size = (inputs.shape.height, inputs.shape.width)
        embeds = condition["prompt_embeds"]
        # Original size, crop and target size describe an image that was made at this size and not cropped.
        time_ids = torch.tensor([[*size, 0, 0, *size]], dtype=embeds.dtype, device=self.device)
        return super()._initialize(condition, inputs, generator) | {"time_ids": time_ids.repeat(len(embeds), 1)}

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        rows = {name: repeat_rows(tensors[name], num_outputs) for name in _ROWS}
        if self._guidance_dim is not None:
            scale = torch.tensor(values["guidance_scale"] - 1).repeat(num_outputs)
            embedding = self.pipe.get_guidance_scale_embedding(scale, embedding_dim=self._guidance_dim)
            rows["guidance"] = embedding.to(device=self.device, dtype=tensors["latents"].dtype)[None]
        return rows

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        noise: torch.Tensor = self.pipe.unet(
            latents,
            timesteps,
            encoder_hidden_states=rows["prompt_embeds"],
            timestep_cond=rows.get("guidance"),
            added_cond_kwargs={"text_embeds": rows["pooled_prompt_embeds"], "time_ids": rows["time_ids"]},
            return_dict=False,
        )[0]
        return noise

    def pack_key(self, state: DenoisingState) -> Hashable | None:
        least = find_least_side(self.pipe.unet)
        if any(side % least for side in state.tensors["latents"].shape[-2:]):
            return None  # the patches of it and others could be as small as a pixel
        if get_current_group() is not None:
            return None
        return super().pack_key(state)

    def _predict_noises(self, calls: Sequence[NoiseCall]) -> list[torch.Tensor]:
        order = order_by_size([call.latents for call in calls])
        ordered = [calls[index] for index in order]
        layout = PatchLayout([LatentSize.measure(call.latents) for call in ordered], self.device)
        rows = {name: torch.cat([call.rows[name] for call in ordered]) for name in calls[0].rows}
        embeds = rows.pop("prompt_embeds")  # attentions have the text of an image once, not once for each patch
        with layout.active():
            patches = self._predict_noise(
                layout.cut([call.latents for call in ordered]),
                layout.spread(torch.cat([call.timesteps for call in ordered])),
                {name: layout.spread(row) for name, row in rows.items()} | {"prompt_embeds": embeds},
                {},
            )
        noises = dict(zip(order, layout.join(patches), strict=True))
        return [noises[index] for index in range(len(calls))]

    def _install_packing(self) -> None:
        install_patches(self.pipe.unet)

    def _predict_packed(
        self, requests: list[DenoisingRequest], timesteps: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        caches = self._open_caches(requests, 0)
        if caches is None:
            return super()._predict_packed(requests, timesteps, inputs)
        with caches.run_packed():
            noises = super()._predict_packed(requests, timesteps, inputs)
        caches.keep_packed()
        return noises

    def _open_caches(self, requests: list[DenoisingRequest], passes: int) -> PatchCaches | None:
        if not any(may_skip(request.values) for request in requests):
            return None
        unet = self.pipe.unet
        if not self._is_cache_installed:
            install_reuse(unet)
            self._is_cache_installed = True
        return PatchCaches(requests, len(unet.config.block_out_channels), len(list_stacks(unet)), self._predictor)

    def _choose_limit(self, quality: Quality, tensors: Tensors) -> float:
        latents, unet = tensors["latents"], self.pipe.unet
        rows = len(latents) * len(tensors["prompt_embeds"])
        numbers = rows * count_patch_numbers(unet.config, *latents.shape[-2:])
        fits = 0 < numbers * latents.element_size() <= self.step_cache.max_bytes
        # Code that was compiled knows nothing of the hooks of its blocks.
        return self.step_cache.find_patch_limit(quality) if fits and not self.is_compiled else 0.0

    def _find_distribution(self, image: torch.Tensor) -> DiagonalGaussianDistribution:
        vae = self.pipe.vae
        if not vae.config.force_upcast or vae.dtype == torch.float32:
            return super()._find_distribution(image)
        # The stock pipelines encode in float32 whatever the format is. The weights, which may be shared, stay.
        moments = _call_in_float32(vae.encoder, image.float())
        return DiagonalGaussianDistribution(
            moments if vae.quant_conv is None else _call_in_float32(vae.quant_conv, moments)
        )

    def _scale_start(self, latents: torch.Tensor, start: ImageStart) -> torch.Tensor:
        latents = latents.to(self._denoising_dtype)
        statistics = self._find_statistics(latents)
        # The stock inpainting pipeline knows no statistics of the image's latents.
        if statistics is None or start.has_mask:
            return super()._scale_start(latents, start)
        mean, std = statistics
        scaled: torch.Tensor = (latents - mean) * self.pipe.vae.config.scaling_factor / std
        return scaled

    def _add_noise(
        self, scheduler: Any, image: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        if not hasattr(scheduler, "add_noise"):  # of flow matching
            return super()._add_noise(scheduler, image, noise, timesteps)
        noisy: torch.Tensor = scheduler.add_noise(image, noise, timesteps)
        return noisy

    def _mix_first(
        self, scheduler: Any, image: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor, start: ImageStart
    ) -> torch.Tensor:
        if start.has_mask and start.strength == 1:
            return self._scale_noise(noise, scheduler)
        mixed = super()._mix_first(scheduler, image, noise, timesteps, start)
        return mixed if start.has_mask else _store_by_pixel(mixed)

    def _decode_outputs(self, latents: torch.Tensor, inputs: GenerationInputs) -> torch.Tensor:
        by_pixel = inputs.start is not None and not inputs.start.has_mask
        return super()._decode_outputs(_store_by_pixel(latents) if by_pixel else latents, inputs)

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        vae, statistics = self.pipe.vae, self._find_statistics(latents)
        if statistics is None:
            return super()._decode(latents)
        mean, std = statistics
        image: torch.Tensor = vae.decode(latents * std / vae.config.scaling_factor + mean, return_dict=False)[0]
        return image

    def _find_statistics(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Mean and standard deviation of the latents of each channel, (1, channels, 1, 1), of models that have them."""
        config = self.pipe.vae.config
        if config.latents_mean is None or config.latents_std is None:
            return None
        mean, std = (
            torch.tensor(moment).view(1, -1, 1, 1).to(like.device, like.dtype)
            for moment in (config.latents_mean, config.latents_std)
        )
        return mean, std

    def _install_sequence_parallelism(self) -> None:
        """Only passes are shared out: a U-Net has no tokens that stay apart from layer to layer."""


def _store_by_pixel(latents: torch.Tensor) -> torch.Tensor:
    """Store latents as the stock image-to-image pipeline has them, where they lie as the VAE has made them."""
    return latents.contiguous(memory_format=torch.channels_last)


def _call_in_float32(module: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    weights = {name: tensor.float() for name, tensor in module.state_dict().items()}
    outputs: torch.Tensor = torch.func.functional_call(module, weights, (inputs,))
    return outputs


ADAPTER = SDXLAdapter
