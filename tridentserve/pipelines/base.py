"""The contract of a pipeline adapter: a diffusers pipeline as three stages and a resumable denoising loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from tridentserve.models.decoded_outputs import DecodedOutputs, Sound
from tridentserve.models.step_cache import StepCache
from tridentserve.pipelines.lora.lora_cache import LoraCache
from tridentserve.pipelines.lora.lora_layers import Loras
from tridentserve.requests import GenerationInputs

Tensors = dict[str, torch.Tensor]

# The names of a state's values for the limit of change up to which a step takes over what an earlier one found (0:
# never), and for the number of steps that did so far.
CACHE_LIMIT, SKIPPED_STEPS = "cache_limit", "skipped_steps"


@dataclass(slots=True)
class DenoisingState:
    """All that stage D needs to resume a request, as plain tensors and JSON-able values, which can be moved, stored and
    batched."""

    step: int
    """The number of denoising steps that are done."""
    num_steps: int
    """The number of denoising steps of the request."""
    tensors: Tensors = field(default_factory=dict)
    """The condition, the latents and the tensors of the diffusers scheduler."""
    values: dict[str, Any] = field(default_factory=dict)
    """The guidance scale, the size, the LoRAs, and the numbers of the diffusers scheduler."""


class PipelineAdapter(ABC):
    """One family of pipelines with the components of some stages, which `tridentserve.pipelines.loading` loads.

    The result equals the stock diffusers pipeline for the same seed. Methods of stages that were not loaded raise
    `ModelFolderError`. Inside `tridentserve.parallel.sequence_parallel(...)`, `step` runs on all members of the group,
    each with the same state, and leaves all of them with the same state.
    """

    family: ClassVar[str]
    is_rebuilt: ClassVar[bool] = False
    """True where nothing is known of the models: they may keep tensors in lists, and make some while they run. Their
    structure is then made anew for each load of weights."""
    step_cache: StepCache = StepCache()
    """Limits of requests whose steps need not all be computed."""
    loras: Loras
    """The LoRAs of requests."""
    is_compiled: bool = False
    """True where steps compile code that has not run yet."""

    def encode(self, inputs: GenerationInputs) -> Tensors:
        """Encode the condition of a request (stage E)."""
        return self.encode_all([inputs])[0]

    @abstractmethod
    def encode_all(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        """Encode the conditions of several requests of any sizes. Requests that agree on guidance share one forward
        pass of each text encoder. Each condition is that of the request alone, up to rounding."""

    @abstractmethod
    def prepare(self, condition: Tensors, inputs: GenerationInputs) -> DenoisingState:
        """Make the state before the first step: the initial noise of the seed, and the timesteps."""

    def step(self, state: DenoisingState, n: int = 1) -> DenoisingState:
        """Run `n` more denoising steps (stage D)."""
        return self.advance([state], n)[0]

    @abstractmethod
    def advance(self, states: Sequence[DenoisingState], n: int = 1) -> list[DenoisingState]:
        """Run `n` more denoising steps of each of several requests together. The requests may be at different steps,
        and may differ in their numbers of steps and outputs and in guidance. Raises `ValueError` unless all of them
        have the same `batch_key`, or the same `pack_key`."""

    @abstractmethod
    def share_lora_cache(self, cache: LoraCache) -> None:
        """Keep LoRAs in a cache that all models of a worker share."""

    @abstractmethod
    def hold_loras(self, states: Sequence[DenoisingState]) -> None:
        """Have the LoRAs of some states on the device before their steps, which would read them otherwise."""

    @abstractmethod
    def end_steps(self) -> None:
        """Free what steps keep beside the states of requests and LoRAs, such as a stock pipeline's call that waits for
        its next step."""

    @abstractmethod
    def batch_key(self, state: DenoisingState) -> Hashable:
        """Return a key that is equal for states that can share a forward pass as rows of one batch."""

    @abstractmethod
    def pack_key(self, state: DenoisingState) -> Hashable | None:
        """Return a key that is equal for states of any sizes that can share a forward pass as one packed sequence; None
        where this one cannot, as inside `sequence_parallel(...)`."""

    @abstractmethod
    def sketch(self, before: torch.Tensor, state: DenoisingState) -> torch.Tensor:
        """Predict the latents that a request will end with. `before` are its latents one step before `state`. The
        result is (num_outputs, channels, height, width), of the middle frame of a video, in float32 on the CPU."""

    @abstractmethod
    def count_sketch_channels(self) -> int:
        """Count the channels of a `sketch` of this model."""

    @abstractmethod
    def decode_sketch(self, sketch: torch.Tensor) -> torch.Tensor:
        """Decode latents in the form of `sketch` (stage C): (num_outputs, 3, height * factor, width * factor) from 0 to
        1, in float32 on the CPU."""

    @abstractmethod
    def latents(self, state: DenoisingState) -> Tensors:
        """Return the tensors that stage C needs of a state whose steps are all done."""

    @abstractmethod
    def decode(self, latents: Tensors, inputs: GenerationInputs, tile: int | None = None) -> NDArray[np.uint8]:
        """Decode pixels (stage C): (num_outputs, height, width, 3) for an image family, and (num_outputs, frames,
        height, width, 3) for a video family, also where the video has one frame. An image is a video of one frame:
        `pixels[:, None]` is a view.

        Inside `sequence_parallel(...)` all members of the group call it with the same latents. The pixels are those of
        one worker up to rounding; the first member gets them, and the other members get an empty array (0, ...).

        `tile` is the side in pixels of the overlapping tiles in which the family's VAE decodes. Tiles need the memory
        of one tile only, but take longer and change the pixels slightly. None decodes all at once, exactly."""

    def decode_sound(self, latents: Tensors, inputs: GenerationInputs) -> Sound | None:
        """Decode the sound of videos (stage C), of the same latents as the pixels. None for a family that makes none,
        and for members of a group but the first."""
        return None

    def decode_outputs(self, latents: Tensors, inputs: GenerationInputs, tile: int | None = None) -> DecodedOutputs:
        """Decode all that stage C makes of a request."""
        return DecodedOutputs(self.decode(latents, inputs, tile), self.decode_sound(latents, inputs))
