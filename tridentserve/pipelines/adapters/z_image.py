"""Z-Image (arXiv 2511.22699): a Qwen3 reads the prompt, a single stream of image and text tokens, a VAE.

Image and text each go through blocks of their own before they are joined, the text behind the image. A prompt has as
many tokens as its text needs; the transformer fills image and text up to multiples of 32 tokens, and masks what is left
between prompts of different lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas

from tridentserve.errors import InvalidRequestError
from tridentserve.parallel import ulysses
from tridentserve.pipelines.adapters.conditions import join_texts, list_negative_prompts, list_prompts, repeat_texts
from tridentserve.pipelines.adapters.image_start import ImageStartAdapter
from tridentserve.pipelines.adapters.timestep_shift import compute_shift_mu, set_shifted_timesteps
from tridentserve.pipelines.base import Tensors
from tridentserve.pipelines.reuse.block_cache import JoinedStream
from tridentserve.requests import GenerationInputs, Shape

# The stock pipeline's default. Longer prompts are cut.
_MAX_TEXT_TOKENS = 512
# The patches of the stock pipeline, 2 x 2 latents, as the transformer names its layers for them.
_PATCHES = "2-1"


class ZImageAdapter(ImageStartAdapter):
    """`ZImagePipeline`, and its image-to-image and inpainting pipelines. With guidance, the condition has two rows:
    positive, then negative, as the stock pipeline calls its transformer.

    Condition: prompt_embeds (rows, tokens of the longer, dim), text_tokens (rows,).
    Latents: (num_outputs, channels, height / 8, width / 8), in float32.
    """

    family = "z_image"
    mixes_loras = False

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        rows = self.pipe.encode_prompt(
            list_prompts(batch),
            self.device,
            do_classifier_free_guidance=bool(self._encode_key(batch[0])),
            negative_prompt=list_negative_prompts(batch),
            max_sequence_length=_MAX_TEXT_TOKENS,
        )
        return join_texts([row for row in rows if row])

    def _check_size(self, shape: Shape) -> None:
        super()._check_size(shape)
        _, *rows = self.pipe.transformer.config.axes_lens
        height, width = (number * self.size_multiple for number in rows)
        if shape.height > height or shape.width > width:
            raise InvalidRequestError(
                f"size {shape} cannot be made: this model has positions for {width}x{height} at most", "size"
            )

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        channels = self.pipe.transformer.config.in_channels
        size = inputs.shape.height, inputs.shape.width
        # What the stock pipeline mixes with an image is in the number format of the texts.
        dtype = torch.float32 if inputs.start is None else condition["prompt_embeds"].dtype
        latents = self.pipe.prepare_latents(inputs.num_outputs, channels, *size, dtype, self.device, generator)
        return {"latents": latents}

    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        mu = compute_shift_mu(scheduler.config, latents.shape[2] // 2 * (latents.shape[3] // 2), max_shift=1.15)
        sigmas = get_default_z_image_sigmas(num_inference_steps)
        set_shifted_timesteps(scheduler, num_inference_steps, self.device, sigmas, mu)

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        return repeat_texts(tensors, num_outputs)

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        transformer = self.pipe.transformer
        images = latents.to(transformer.dtype).unsqueeze(2).unbind()
        texts = zip(rows["prompt_embeds"], rows["text_tokens"].tolist(), strict=True)
        outputs = transformer(
            list(images),
            (1000 - timesteps) / 1000,
            [embeds[:tokens] for embeds, tokens in texts],
            return_dict=False,
        )[0]
        return -torch.stack(outputs).squeeze(2).float()

    def _apply_guidance(self, noise: torch.Tensor, values: dict[str, Any], timestep: torch.Tensor) -> torch.Tensor:
        if noise.shape[0] == 1:
            return noise[0]
        conditional, unconditional = noise
        guided: torch.Tensor = conditional + values["guidance_scale"] * (conditional - unconditional)
        return guided

    def _list_cached_blocks(self) -> list[torch.nn.Module]:
        # Before them, image and text go through blocks of their own.
        return list(self.pipe.transformer.layers)

    def _find_joined_stream(self, tensors: Tensors) -> JoinedStream:
        height, width = tensors["latents"].shape[2:]
        tokens = height // 2 * (width // 2)
        return JoinedStream(tokens + -tokens % SEQ_MULTI_OF, text_first=False)

    def _decode_outputs(self, latents: torch.Tensor, inputs: GenerationInputs) -> torch.Tensor:
        if inputs.start is not None and inputs.start.has_mask:
            # The last bits depend on this: there, latents lie as the stock pipeline's VAE has made those of the image.
            latents = latents.contiguous(memory_format=torch.channels_last)
        return super()._decode_outputs(latents, inputs)

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        return latents

    def _install_sequence_parallelism(self) -> None:
        transformer = self.pipe.transformer
        ulysses.install_blocks(
            transformer.noise_refiner[0],
            [block.attention for block in (*transformer.noise_refiner, *transformer.layers)],
            transformer.all_final_layer[_PATCHES],
            text_first=False,
        )
        for block in transformer.noise_refiner:
            block.register_forward_pre_hook(_share_positions)
        transformer._build_unified_sequence = _join_own_tokens(transformer._build_unified_sequence)


def _share_positions(block: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Select the positions of this rank's image tokens for a block that sees the image alone."""
    tokens, mask, positions, *others = args
    return tokens, mask, ulysses.share(positions, dim=1), *others


def _join_own_tokens(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the stock method that joins image and text, for images of which this rank has some tokens only. All images
    of a batch have one size."""

    def join(image: torch.Tensor, positions: torch.Tensor, lengths: list[int], *others: Any) -> Any:
        return stock(image, ulysses.share(positions, dim=1), [image.shape[1]] * len(lengths), *others)

    return join


ADAPTER = ZImageAdapter
