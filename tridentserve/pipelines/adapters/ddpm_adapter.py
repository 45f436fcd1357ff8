"""What families that predict the noise of a diffusion process share (DDPM, arXiv 2006.11239, and its many solvers).

Their latents are (num_outputs, channels, height / 8, width / 8), and the scheduler says how large the first noise is.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from diffusers.utils.torch_utils import randn_tensor

from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs, Shape


class DDPMAdapter(DiffusersAdapter):
    """The start, the timesteps and the latents of such a family. `denoiser` is what its pipeline calls the model."""

    denoiser: ClassVar[str] = "transformer"

    def _initial_tensors(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        factor = self.pipe.vae_scale_factor
        shape = (
            inputs.num_outputs,
            getattr(self.pipe, self.denoiser).config.in_channels,
            inputs.shape.height // factor,
            inputs.shape.width // factor,
        )
        dtype = condition["prompt_embeds"].dtype
        return {"latents": randn_tensor(shape, generator=generator, device=self.device, dtype=dtype)}

    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        scheduler.set_timesteps(num_inference_steps, device=self.device)

    def _scaled_noise(self, noise: torch.Tensor, scheduler: Any) -> torch.Tensor:
        scaled: torch.Tensor = noise * scheduler.init_noise_sigma
        return scaled

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        return latents
