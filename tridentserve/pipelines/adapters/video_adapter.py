"""What the video families share beside `diffusers_adapter`: latents with frames, and decoding to frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tridentserve.parallel import is_first
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.pipelines.tiling import tiled
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage


class VideoAdapter(DiffusersAdapter):
    """A `diffusers` pipeline whose VAE gives (num_outputs, channels, frames, height, width)."""

    def decode(self, latents: Tensors, inputs: GenerationInputs, tile: int | None = None) -> NDArray[np.uint8]:
        shape = inputs.shape
        with self._running(Stage.DECODE), tiled(self.pipe.vae, tile):
            scaled = self._unpack(self._on_device(latents)["latents"], shape)
            video = self.pipe.vae.decode(scaled, return_dict=False)[0]
            if not is_first():
                return np.zeros((0, shape.num_frames, shape.height, shape.width, 3), np.uint8)
            frames = self.pipe.video_processor.postprocess_video(video, output_type="pt")
            # Rounded as the stock pipeline's images are, but where the frames lie: bytes travel, not floats.
            pixels = (frames.float() * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).contiguous()
        frames_array: NDArray[np.uint8] = pixels.cpu().numpy()
        return frames_array

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Latents as the VAE decodes them, (num_outputs, channels, latent frames, height / 8, width / 8), scaled (by
        one factor, where a family does not say otherwise)."""
        vae = self.pipe.vae
        scaled: torch.Tensor = latents.to(vae.dtype) / vae.config.scaling_factor
        return scaled

    def _noise(self, inputs: GenerationInputs, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """The first latents of all outputs, as the stock pipeline draws them."""
        shape = inputs.shape
        latents: torch.Tensor = self._prepared_latents(
            inputs.num_outputs,
            self._num_channels(),
            height=shape.height,
            width=shape.width,
            num_frames=shape.num_frames,
            dtype=dtype,
            device=self.device,
            generator=generator,
        )
        return latents

    def _prepared_latents(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """The stock pipeline's `prepare_latents`."""
        latents: torch.Tensor = self.pipe.prepare_latents(*arguments, **options)
        return latents

    def _num_channels(self) -> int:
        """Of the latents: those that the transformer takes, where it takes no others beside them."""
        channels: int = self.pipe.transformer.config.in_channels
        return channels


def statistic(vae: Any, name: str, like: torch.Tensor) -> torch.Tensor:
    """A statistic of the latents, one number per channel in the config of the VAE: (1, channels, 1, 1, 1)."""
    return torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1).to(like.device, like.dtype)
