"""The common part of families that predict the noise of a diffusion process (DDPM, arXiv 2006.11239, and its solvers).

Their latents are (num_outputs, channels, height / 8, width / 8), and the scheduler determines the size of the first
noise.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor

from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.requests import GenerationInputs, Shape


class DDPMAdapter(DiffusersAdapter):
    """A family with the first noise, the timesteps and the latents of a diffusion process."""

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
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

    def _scale_noise(self, noise: torch.Tensor, scheduler: Any) -> torch.Tensor:
        scaled: torch.Tensor = noise * scheduler.init_noise_sigma
        return scaled

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        return latents
