"""One request while its denoising steps run: its latents, its scheduler, and the rows that it adds to a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tridentserve.pipelines.adapters import scheduler_state
from tridentserve.pipelines.base import DenoisingState, Tensors

if TYPE_CHECKING:
    from tridentserve.pipelines.adapters.stepping_adapter import SteppingAdapter

# The names of a state's tensors that belong to its scheduler begin with this.
SCHEDULER_PREFIX = "scheduler."
# The name of a state's value for the shift of the noise levels; None for that of the model.
FLOW_SHIFT = "flow_shift"
# That of its LoRAs.
LORAS = "loras"
# That of whether its latents lie in memory pixel by pixel: the last bits of convolutions depend on it, and tensors that
# go to another worker do not keep it.
PIXELWISE = "pixelwise"
# The name of a state's tensor for its random generator, where its scheduler draws noise at each step.
GENERATOR = "generator"


class DenoisingRequest:
    """One request on the device, between a state before some steps and the state after them."""

    def __init__(self, before: DenoisingState, tensors: Tensors, scheduler: Any, rows: Tensors) -> None:
        self.before, self.tensors, self.scheduler, self.rows = before, tensors, scheduler, rows
        self.latents = tensors["latents"]
        self.values = before.values
        self.steps_done = before.step

    @classmethod
    def resume(cls, state: DenoisingState, adapter: SteppingAdapter) -> DenoisingRequest:
        """Move a state to the adapter's device, with a scheduler of its own."""
        tensors = adapter._move_to_device(state.tensors)
        if state.values[PIXELWISE]:
            tensors["latents"] = tensors["latents"].contiguous(memory_format=torch.channels_last)
        scheduler = scheduler_state.make_scheduler(adapter.pipe.scheduler, state.values[FLOW_SHIFT])
        scheduler_state.load(scheduler, tensors, state.values["scheduler"], adapter.device)
        rows = adapter._build_rows(tensors, state.values, tensors["latents"].shape[0])
        return cls(state, tensors, scheduler, rows)

    def next_timestep(self) -> torch.Tensor:
        """The timestep of the next step, a tensor of one number."""
        timestep: torch.Tensor = self.scheduler.timesteps[self.steps_done - self.before.num_steps]
        return timestep.to(self.latents.device)

    def find_timestep_after(self) -> torch.Tensor | None:
        """The timestep after that of the next step, a tensor of one number; None where the next step is the last."""
        index = self.steps_done + 1 - self.before.num_steps  # from the end: not all of the schedule need be computed
        return self.scheduler.timesteps[index] if index < 0 else None

    def scale_input(self, timestep: torch.Tensor) -> torch.Tensor:
        """Scale the latents as the transformer takes them at this timestep."""
        if not hasattr(self.scheduler, "scale_model_input"):
            return self.latents
        scaled: torch.Tensor = self.scheduler.scale_model_input(self.latents, timestep)
        return scaled

    def take_step(self, latents: torch.Tensor) -> None:
        """Replace the latents by those after the next step."""
        self.latents = latents
        self.steps_done += 1

    def make_state(self, n: int) -> DenoisingState:
        """The state after `n` steps, all of which have been taken."""
        scheduler_tensors, scheduler_values = scheduler_state.dump(self.scheduler, SCHEDULER_PREFIX)
        kept = {name: tensor for name, tensor in self.tensors.items() if not name.startswith(SCHEDULER_PREFIX)}
        return DenoisingState(
            step=self.before.step + n,
            num_steps=self.before.num_steps,
            tensors=kept | {"latents": self.latents} | scheduler_tensors,
            values=self.values | {"scheduler": scheduler_values},
        )
