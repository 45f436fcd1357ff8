"""The common part of families that make images from text and may start from an image instead: an image that is changed
as a whole, or in the part that a mask names.

A request begins at a later step of its schedule, with the image's latents and as much noise as there is at that step.
With a mask, the latents outside it are replaced after each step by those of the image with the noise of the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from tridentserve.errors import InvalidRequestError
from tridentserve.models.input_image import open_mask
from tridentserve.pipelines.adapters.denoising_request import DenoisingRequest
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.adapters.image_conditioned import preprocess_image
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs, ImageStart
from tridentserve.stages import Stage

# The image in the condition, and in a state; the mask in both, and the first noise of a request with a mask.
_DISTRIBUTION, _IMAGE, _MASK, _NOISE = "start_distribution", "start_image", "start_mask", "start_noise"


class ImageStartAdapter(DiffusersAdapter):
    """A family whose requests may have a `start`. Its results are then those of the stock image-to-image pipeline, or
    with a mask of the stock inpainting pipeline, for the same components.

    Condition: start_distribution, means and logarithms of variances of the image's latents, (1, 2 * channels, height /
    8, width / 8), and start_mask (1, 1, height / 8, width / 8), 1 where the image is painted anew. State of a request
    with a mask: start_image and start_mask (1, ...) and start_noise (num_outputs, ...) in the form of the latents.
    """

    def encode_all(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        conditions = super().encode_all(batch)
        if self.described.image_start is None:
            return conditions
        with self._run_stage(Stage.ENCODE):
            return [condition | self._encode_start(inputs) for condition, inputs in zip(conditions, batch, strict=True)]

    def _encode_start(self, inputs: GenerationInputs) -> Tensors:
        """Encode the image and the mask: the tensors that they add to the condition, none without an image."""
        start, has_mask = inputs.start, inputs.mask is not None
        if (start is not None) != (inputs.image is not None):
            raise InvalidRequestError(
                "strength: there is one exactly where there is an image to start from", "strength"
            )
        if has_mask != (start is not None and start.has_mask):
            raise InvalidRequestError("mask: there is one exactly where the image is changed in a part", "mask")
        if start is None:
            return {}
        self._check_size(inputs.shape)
        vae = self.pipe.vae
        image = preprocess_image(self.pipe.image_processor, inputs).to(self.device, vae.dtype)
        parameters = self._find_distribution(image).parameters
        mask = {_MASK: self._encode_mask(inputs, parameters)} if start.has_mask else {}
        return {_DISTRIBUTION: parameters, **mask}

    def _find_distribution(self, image: torch.Tensor) -> DiagonalGaussianDistribution:
        """Find the distribution of the latents of an image, (1, 3, height, width)."""
        distribution: DiagonalGaussianDistribution = self.pipe.vae.encode(image).latent_dist
        return distribution

    def _encode_mask(self, inputs: GenerationInputs, like: torch.Tensor) -> torch.Tensor:
        """Scale the mask to the latents: (1, 1, height, width) with the last sides of `like`."""
        processor = VaeImageProcessor(
            vae_scale_factor=self.pipe.vae_scale_factor, do_normalize=False, do_binarize=True, do_convert_grayscale=True
        )
        mask = processor.preprocess(open_mask(inputs), height=inputs.shape.height, width=inputs.shape.width)
        scaled = torch.nn.functional.interpolate(mask, size=like.shape[-2:])
        return scaled.to(self.device, self._denoising_dtype)

    def _draw(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        if _DISTRIBUTION not in condition:
            return super()._draw(condition, inputs, generator)
        distribution = DiagonalGaussianDistribution(condition.pop(_DISTRIBUTION))
        assert inputs.start is not None, "E has seen it"
        image = self._scale_start(distribution.sample(generator), inputs.start).to(self._denoising_dtype)
        drawn = super()._draw(condition, inputs, generator)
        if _MASK in condition:
            # The stock pipelines draw latents of what the mask leaves, which only other checkpoints take.
            distribution.sample(generator)
            drawn[_MASK] = self._pack_start(condition.pop(_MASK).expand(image.shape))
        return drawn | {_IMAGE: self._pack_start(image)}

    def _begin(self, tensors: Tensors, inputs: GenerationInputs, scheduler: Any) -> int:
        if _IMAGE not in tensors:
            return super()._begin(tensors, inputs, scheduler)
        assert inputs.start is not None, "E has seen it"
        image, noise, steps = tensors[_IMAGE], tensors["latents"], inputs.num_inference_steps
        first = steps - inputs.start.count_steps(steps)
        if first >= steps:
            raise InvalidRequestError(f"strength: leaves no step of {steps}", "strength")
        if image.shape[1:] != noise.shape[1:]:  # as that of a checkpoint which was made for inpainting
            raise InvalidRequestError(
                "image: the denoising model of this one takes other channels than an image", "image"
            )
        if hasattr(scheduler, "set_begin_index"):  # others look for their place at each step
            scheduler.set_begin_index(first)
        timesteps = scheduler.timesteps[first : first + 1].repeat(len(noise))
        repeated = image.repeat(len(noise), *(1 for _ in image.shape[1:]))
        tensors["latents"] = self._mix_first(scheduler, repeated, noise, timesteps, inputs.start)
        if _MASK in tensors:
            tensors[_NOISE] = noise
        else:
            del tensors[_IMAGE]
        return len(scheduler.timesteps) - first

    def _keep_given(self, request: DenoisingRequest, stepped: torch.Tensor) -> torch.Tensor:
        tensors = request.tensors
        if _MASK not in tensors:
            return super()._keep_given(request, stepped)
        mask, image, timestep = tensors[_MASK], tensors[_IMAGE], request.find_timestep_after()
        if timestep is not None:
            image = self._add_noise(request.scheduler, image, tensors[_NOISE], timestep.reshape(1))
        return (1 - mask) * image + mask * stepped

    def _scale_start(self, latents: torch.Tensor, start: ImageStart) -> torch.Tensor:
        """Scale latents of an image as D has them: (1, channels, height / 8, width / 8)."""
        config = self.pipe.vae.config
        shifted = latents if config.shift_factor is None else latents - config.shift_factor
        scaled: torch.Tensor = shifted * config.scaling_factor
        return scaled

    def _pack_start(self, latents: torch.Tensor) -> torch.Tensor:
        """Put latents of an image, (1, channels, height / 8, width / 8), into the form that they have in D."""
        return latents.contiguous()

    def _mix_first(
        self, scheduler: Any, image: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor, start: ImageStart
    ) -> torch.Tensor:
        """Mix the first latents, of all outputs, at the first of their timesteps."""
        return self._add_noise(scheduler, image, noise, timesteps)

    def _add_noise(
        self, scheduler: Any, image: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Add to the image as much noise as there is at a timestep."""
        if not hasattr(scheduler, "scale_noise"):
            name = type(scheduler).__name__
            raise InvalidRequestError(f"image: this model's scheduler ({name}) cannot start from one", "image")
        mixed: torch.Tensor = scheduler.scale_noise(image, timesteps, noise)
        return mixed
