"""What the families share: a stock diffusers pipeline, run stage by stage with its own methods.

A family's file says how its pipeline encodes, starts, predicts and unpacks; see `sd3` for a short one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from numpy.typing import NDArray

from tridentserve.errors import CheckpointError, InvalidRequestError
from tridentserve.families import FAMILIES
from tridentserve.pipelines import scheduler_state
from tridentserve.pipelines.base import DenoisingState, PipelineAdapter, Tensors
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

_SCHEDULER = "scheduler."


class DiffusersAdapter(PipelineAdapter):
    """A `diffusers` pipeline in stages. `pipe` holds real components for `stages` and stubs for the others."""

    def __init__(self, pipe: Any, stages: frozenset[Stage], device: torch.device) -> None:
        self.pipe = pipe
        self.stages = stages
        self.device = device
        if Stage.DIFFUSE in stages:
            self._install_sequence_parallelism()

    def encode(self, inputs: GenerationInputs) -> Tensors:
        with self._running(Stage.ENCODE):
            return self._encode(inputs)

    def prepare(self, condition: Tensors, inputs: GenerationInputs) -> DenoisingState:
        self._check_size(inputs.shape)
        with self._running(Stage.DIFFUSE):
            tensors = self._on_device(condition)
            # A CPU generator: the noise of a seed is the same on every device.
            generator = torch.Generator("cpu").manual_seed(inputs.seed)
            tensors |= self._initial_tensors(tensors, inputs, generator)
            scheduler = scheduler_state.new_scheduler(self.pipe.scheduler)
            self._set_timesteps(scheduler, tensors["latents"], inputs.num_inference_steps)
            scheduler_tensors, scheduler_values = scheduler_state.dump(scheduler, _SCHEDULER)
        return DenoisingState(
            step=0,
            num_steps=len(scheduler.timesteps),
            tensors=tensors | scheduler_tensors,
            values={"guidance_scale": inputs.guidance_scale, "scheduler": scheduler_values},
        )

    def step(self, state: DenoisingState, n: int = 1) -> DenoisingState:
        if n < 1 or state.step + n > state.num_steps:
            raise ValueError(f"{n} more steps asked for, but {state.step} of {state.num_steps} are done")
        with self._running(Stage.DIFFUSE):
            tensors = self._on_device(state.tensors)
            scheduler = scheduler_state.new_scheduler(self.pipe.scheduler)
            scheduler_state.load(scheduler, tensors, state.values["scheduler"], self.device)
            latents = tensors["latents"]
            for timestep in scheduler.timesteps[state.step : state.step + n].to(self.device):
                noise = self._predict_noise(latents, timestep, tensors, state.values)
                latents = scheduler.step(noise, timestep, latents, return_dict=False)[0]
            scheduler_tensors, scheduler_values = scheduler_state.dump(scheduler, _SCHEDULER)
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(_SCHEDULER)}
        return DenoisingState(
            step=state.step + n,
            num_steps=state.num_steps,
            tensors=kept | {"latents": latents} | scheduler_tensors,
            values=state.values | {"scheduler": scheduler_values},
        )

    def latents(self, state: DenoisingState) -> Tensors:
        if state.step != state.num_steps:
            raise ValueError(f"the latents are not ready: {state.step} of {state.num_steps} steps are done")
        return {"latents": state.tensors["latents"]}

    def decode(self, latents: Tensors, inputs: GenerationInputs) -> NDArray[np.uint8]:
        with self._running(Stage.DECODE):
            unpacked = self._unpack(self._on_device(latents)["latents"], inputs.shape)
            config = self.pipe.vae.config
            image = self.pipe.vae.decode(unpacked / config.scaling_factor + config.shift_factor, return_dict=False)[0]
            # By way of PIL, as the stock pipeline does: its rounding is part of the result.
            pictures = self.pipe.image_processor.postprocess(image, output_type="pil")
        return np.stack([np.asarray(picture, dtype=np.uint8) for picture in pictures])

    @abstractmethod
    def _encode(self, inputs: GenerationInputs) -> Tensors:
        """The condition of one output; outputs of a request share it."""

    @abstractmethod
    def _initial_tensors(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        """`latents`, the noise of all outputs, and what else the family's transformer needs at each step."""

    @abstractmethod
    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        """Give a fresh scheduler its timesteps."""

    @abstractmethod
    def _predict_noise(
        self, latents: torch.Tensor, timestep: torch.Tensor, tensors: Tensors, values: dict[str, Any]
    ) -> torch.Tensor:
        """The transformer's output for one step, guidance applied; shaped like `latents`."""

    @abstractmethod
    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Latents as the VAE takes them, (num_outputs, channels, height / 8, width / 8), not yet scaled."""

    @abstractmethod
    def _install_sequence_parallelism(self) -> None:
        """Hook the transformer, once; without a group the hooks change nothing."""

    @contextmanager
    def _running(self, stage: Stage) -> Iterator[None]:
        if stage not in self.stages:
            held = ", ".join(sorted(self.stages)) or "none"
            raise CheckpointError(f"the {stage} stage of this {self.family} model was not loaded (loaded: {held})")
        with torch.no_grad():
            yield

    def _check_size(self, shape: Shape) -> None:
        multiple = FAMILIES[self.family].size_multiple
        if shape.height % multiple or shape.width % multiple:
            raise InvalidRequestError(f"size {shape} must be a multiple of {multiple} in both directions", "size")

    def _on_device(self, tensors: Tensors) -> Tensors:
        # Tensors of the scheduler stay where they are: scheduler_state knows which belong on the host.
        return {
            name: tensor if name.startswith(_SCHEDULER) else tensor.to(self.device) for name, tensor in tensors.items()
        }


def shift_mu(config: Any, image_tokens: int, max_shift: float) -> float:
    """The resolution-dependent timestep shift `mu`; `max_shift` is the family's default where `config` has none."""
    mu: float = calculate_shift(
        image_tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )
    return mu


def per_output(embeds: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """Rows of a condition, (rows, ...), repeated for each output as `num_images_per_prompt` does."""
    return embeds if num_outputs == 1 else embeds.repeat_interleave(num_outputs, dim=0)
