"""The contract of a pipeline adapter: a diffusers pipeline as three stages and a resumable denoising loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from tridentserve.requests import GenerationInputs

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class DenoisingState:
    """Everything a D stage needs to go on, as plain tensors and JSON-able values: it can be moved, stored, batched.

    `tensors` holds the condition, the latents and the tensors of the diffusers scheduler; `values` its numbers.
    `step` denoising steps of `num_steps` are done.
    """

    step: int
    num_steps: int
    tensors: Tensors = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class PipelineAdapter(ABC):
    """One family of pipelines, with the components of some stages loaded (see `tridentserve.pipelines.loading`).

    The result equals the stock diffusers pipeline for the same seed. Methods of stages that were not loaded raise
    `CheckpointError`. Inside `tridentserve.parallel.sequence_parallel(...)`, `step` runs on all members of the group,
    each with the same state, and leaves all of them with the same state.
    """

    family: ClassVar[str]

    def encode(self, inputs: GenerationInputs) -> Tensors:
        """The condition (stage E)."""
        return self.encode_all([inputs])[0]

    @abstractmethod
    def encode_all(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        """The conditions of several requests, whatever their sizes: in one forward pass of each text encoder, where
        they agree on guidance. Each is that of the request alone, up to rounding."""

    @abstractmethod
    def prepare(self, condition: Tensors, inputs: GenerationInputs) -> DenoisingState:
        """The state before the first step: initial noise from the seed, timesteps."""

    def step(self, state: DenoisingState, n: int = 1) -> DenoisingState:
        """`n` more denoising steps (stage D)."""
        return self.advance([state], n)[0]

    @abstractmethod
    def advance(self, states: Sequence[DenoisingState], n: int = 1) -> list[DenoisingState]:
        """`n` more denoising steps of each of several requests, together: they may be at different steps, and have
        different numbers of steps, guidance and outputs. `ValueError` unless all have the same `batch_key`."""

    @abstractmethod
    def let_go(self) -> None:
        """Give back the memory of what only steps need (a LoRA); steps that come load it again."""

    @abstractmethod
    def batch_key(self, state: DenoisingState) -> Hashable:
        """Equal for states that can share a forward pass."""

    @abstractmethod
    def latents(self, state: DenoisingState) -> Tensors:
        """What the decode stage needs of a state whose steps are all done."""

    @abstractmethod
    def decode(self, latents: Tensors, inputs: GenerationInputs, tile: int | None = None) -> NDArray[np.uint8]:
        """Pixels (stage C): (num_outputs, height, width, 3) from an image family, (num_outputs, frames, height, width,
        3) from a video family, also for one frame. An image is a video of one frame: `pixels[:, None]`, a view.

        Inside `sequence_parallel(...)`, it runs on all members of the group, each with the same latents; the pixels are
        those of one worker up to rounding, and the first member's, the others get none (0, ...).
        `tile`: decode in overlapping tiles of so many pixels a side, as the family's VAE does it. That takes the memory
        of a tile, longer, and gives slightly other pixels; None: all at once, exactly."""
