"""The common part of all families: a stock diffusers pipeline runs stage by stage, with its own methods.

A family's file defines how its pipeline encodes, starts, predicts and unpacks; `sd3` is a short example.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tridentserve.errors import InvalidRequestError
from tridentserve.models.families import FAMILIES
from tridentserve.models.family import Family
from tridentserve.models.input_image import check_images
from tridentserve.parallel import is_first, rows
from tridentserve.pipelines.adapters import scheduler_state
from tridentserve.pipelines.adapters.clean_latents import predict_clean
from tridentserve.pipelines.adapters.denoising_request import FLOW_SHIFT, GENERATOR, LORAS, PIXELWISE, SCHEDULER_PREFIX
from tridentserve.pipelines.adapters.stepping_adapter import SteppingAdapter
from tridentserve.pipelines.base import CACHE_LIMIT, SKIPPED_STEPS, DenoisingState, Tensors
from tridentserve.pipelines.pixels import round_pixels
from tridentserve.pipelines.tiling import decode_tiled
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

# The names of a condition's tensors that were made of texts begin with these.
_TEXTS = ("prompt_embeds", "pooled_prompt_embeds")


class DiffusersAdapter(SteppingAdapter):
    """A `diffusers` pipeline in stages."""

    described: Family
    """The family as this model has it: its own `size_multiple`, and whether requests may start from an image."""

    def __init__(self, pipe: Any, stages: frozenset[Stage], device: torch.device) -> None:
        super().__init__(pipe, stages, device)
        if Stage.DIFFUSE in stages:
            self._install_sequence_parallelism()
        if Stage.DECODE in stages:
            rows.install(pipe.vae.decoder)

    def encode_all(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        alike: defaultdict[Hashable, list[int]] = defaultdict(list)
        for index, inputs in enumerate(batch):
            check_images(self.described, inputs)
            alike[self._encode_key(inputs)].append(index)
        conditions: dict[int, Tensors] = {}
        with self._run_stage(Stage.ENCODE):
            for indices in alike.values():
                together = self._encode_together([batch[index] for index in indices])
                conditions.update(zip(indices, map(self._hand_on, together), strict=True))
        return [conditions[index] for index in range(len(batch))]

    def read_predictor(self, folder: Path) -> None:
        """Read what decides from the model folder where results of earlier steps are used again. Families whose limits
        alone decide have no use for it. Raises `ModelFolderError`."""

    @property
    def size_multiple(self) -> int:
        """Height and width must be multiples of this many pixels."""
        return self.described.size_multiple

    @property
    def _denoising_dtype(self) -> torch.dtype:
        """The number format of D, where D is on another worker too."""
        dtype: torch.dtype = getattr(self.pipe, self.denoiser).dtype
        return dtype

    def _hand_on(self, condition: Tensors) -> Tensors:
        """Convert what the texts became to the number format of D. The stock pipelines do so too, or else can only run
        with both in one format."""
        return {
            name: tensor.to(self._denoising_dtype) if name.startswith(_TEXTS) and tensor.is_floating_point() else tensor
            for name, tensor in condition.items()
        }

    def prepare(self, condition: Tensors, inputs: GenerationInputs) -> DenoisingState:
        self._check_size(inputs.shape)
        with self._run_stage(Stage.DIFFUSE):
            tensors = self._move_to_device(condition)
            # The generator is the CPU's, so that the noise of a seed is the same on every device.
            generator = torch.Generator("cpu").manual_seed(inputs.seed)
            tensors |= self._draw(tensors, inputs, generator)
            scheduler = scheduler_state.make_scheduler(self.pipe.scheduler, inputs.flow_shift)
            try:
                self._set_timesteps(scheduler, self._select_timed(tensors), inputs.num_inference_steps)
            except ValueError as error:  # LCM and TCD, for example, have an upper limit.
                refused = f"this model's scheduler cannot make {inputs.num_inference_steps} steps: {error}"
                raise InvalidRequestError(refused, "num_inference_steps") from error
            num_steps = self._begin(tensors, inputs, scheduler)
            if scheduler_state.draws_noise(scheduler):
                tensors[GENERATOR] = generator.get_state()
            scheduler_tensors, scheduler_values = scheduler_state.dump(scheduler, SCHEDULER_PREFIX)
        return DenoisingState(
            step=0,
            num_steps=num_steps,
            tensors=tensors | scheduler_tensors,
            values={
                "guidance_scale": inputs.guidance_scale,
                "guidance_scale_2": inputs.guidance_scale_2,
                FLOW_SHIFT: inputs.flow_shift,
                "size": str(inputs.shape),
                LORAS: [use.to_plain() for use in inputs.loras],
                CACHE_LIMIT: self._choose_limit(inputs.quality, tensors),
                SKIPPED_STEPS: 0.0,
                PIXELWISE: _lies_pixelwise(tensors["latents"]),
                "scheduler": scheduler_values,
            },
        )

    def sketch(self, before: torch.Tensor, state: DenoisingState) -> torch.Tensor:
        with self._run_stage(Stage.DIFFUSE):
            clean = predict_clean(self.pipe.scheduler, before, state)
            return self._select_frame(clean, Shape.parse(state.values["size"])).float().cpu()

    def _select_frame(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Select the latents of one frame of each output, (num_outputs, channels, height, width)."""
        return self._unpack(latents, shape)

    def count_sketch_channels(self) -> int:
        config = self.pipe.vae.config
        channels: int = config.get("latent_channels") or config["z_dim"]
        return channels

    def decode_sketch(self, sketch: torch.Tensor) -> torch.Tensor:
        with self._run_stage(Stage.DECODE):
            decoded = self._decode_frame(sketch.to(self.device, self.pipe.vae.dtype))
            return (decoded.float() / 2 + 0.5).clamp(0, 1).cpu()

    def _decode_frame(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode what `_select_frame` gives: the VAE's output, (num_outputs, 3, height, width)."""
        return self._decode(latents)

    def latents(self, state: DenoisingState) -> Tensors:
        if state.step != state.num_steps:
            raise ValueError(f"the latents are not ready: {state.step} of {state.num_steps} steps are done")
        return {"latents": state.tensors["latents"]}

    def decode(self, latents: Tensors, inputs: GenerationInputs, tile: int | None = None) -> NDArray[np.uint8]:
        with self._run_stage(Stage.DECODE), decode_tiled(self.pipe.vae, tile):
            unpacked = self._unpack(self._take_latents(latents), inputs.shape)
            decoded = self._decode_outputs(unpacked, inputs)
            if not is_first():
                return np.zeros((0, inputs.shape.height, inputs.shape.width, 3), np.uint8)
            return round_pixels(self.pipe.image_processor.postprocess(decoded, output_type="pt"))

    def _take_latents(self, latents: Tensors) -> torch.Tensor:
        """Take over the latents that D hands on, in the number format of the VAE. As with texts, the stock pipelines do
        so too, or else can only run with D and C in one format."""
        return latents["latents"].to(self.device, self.pipe.vae.dtype)

    def _encode_key(self, inputs: GenerationInputs) -> Hashable:
        """Return a key that is equal for requests whose prompts can be encoded together."""
        return inputs.guidance_scale > FAMILIES[self.family].unguided_scale

    @abstractmethod
    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        """Encode the conditions of requests with one `_encode_key` in one pass. The outputs of a request share one."""

    @abstractmethod
    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        """Make `latents`, the noise of all outputs, and the other tensors that each step needs in addition to the
        condition. Tensors that no step needs may be removed from the condition."""

    def _draw(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        """Draw all that a request begins with, in the order of the stock pipeline: the result of `_initialize`, and for
        some requests more."""
        return self._initialize(condition, inputs, generator)

    def _begin(self, tensors: Tensors, inputs: GenerationInputs, scheduler: Any) -> int:
        """Make the initial latents of the noise in `tensors`, and return the number of steps from there. `scheduler`
        has its timesteps."""
        tensors["latents"] = self._scale_noise(tensors["latents"], scheduler)
        return len(scheduler.timesteps)

    def _draw_packed_noise(
        self, inputs: GenerationInputs, dtype: torch.dtype, generator: torch.Generator, *first: Any
    ) -> Any:
        """Call the stock pipeline's `prepare_latents` where it packs latents 2 by 2. `first` are arguments before the
        common ones. The result is the noise of all outputs, with the positions in some families."""
        return self.pipe.prepare_latents(
            *first,
            inputs.num_outputs,
            self.pipe.transformer.config.in_channels // 4,
            inputs.shape.height,
            inputs.shape.width,
            dtype,
            self.device,
            generator,
        )

    def _select_timed(self, tensors: Tensors) -> torch.Tensor:
        """Select the latents whose number sets the noise levels, where it does."""
        return tensors["latents"]

    @abstractmethod
    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        """Give a fresh scheduler its timesteps."""

    @abstractmethod
    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Unpack latents as the VAE takes them, (num_outputs, channels, height / 8, width / 8), without scaling
        them."""

    def _scale_noise(self, noise: torch.Tensor, scheduler: Any) -> torch.Tensor:
        """Scale the noise to the initial latents. `scheduler` has its timesteps."""
        return noise

    def _decode_outputs(self, latents: torch.Tensor, inputs: GenerationInputs) -> torch.Tensor:
        """Decode the unpacked latents of a request, as `_decode` does for most of them."""
        return self._decode(latents)

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode unpacked latents: the VAE's output, (num_outputs, 3, height, width)."""
        config = self.pipe.vae.config
        scaled = latents / config.scaling_factor
        if config.shift_factor is not None:
            scaled = scaled + config.shift_factor
        image: torch.Tensor = self.pipe.vae.decode(scaled, return_dict=False)[0]
        return image

    @abstractmethod
    def _install_sequence_parallelism(self) -> None:
        """Hook the transformer once. Without a group the hooks change nothing."""

    def _check_size(self, shape: Shape) -> None:
        family, multiple = self.described, self.size_multiple
        if shape.height % multiple or shape.width % multiple:
            raise InvalidRequestError(f"size {shape} must be a multiple of {multiple} in both directions", "size")
        if not family.allows_frames(shape.num_frames):
            rule = f"{family.frame_multiple} * k + 1" if family.frame_multiple else "1"
            raise InvalidRequestError(
                f"{shape.num_frames} frames cannot be made by {family.name}; the number must be {rule}", "num_frames"
            )


def _lies_pixelwise(latents: torch.Tensor) -> bool:
    is_image = latents.dim() == 4
    return is_image and not latents.is_contiguous() and latents.is_contiguous(memory_format=torch.channels_last)
