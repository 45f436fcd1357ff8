"""The common part of the video families: latents with frames, and decoding to frames."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tridentserve.parallel import is_first
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.pipelines.pixels import round_pixels
from tridentserve.pipelines.tiling import decode_tiled
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

# For `_unpack`, which looks at the number of frames alone.
_ONE_FRAME = Shape(0, 0)


class VideoAdapter(DiffusersAdapter):
    """A `diffusers` pipeline whose VAE gives (num_outputs, channels, frames, height, width)."""

    def decode(self, latents: Tensors, inputs: GenerationInputs, tile: int | None = None) -> NDArray[np.uint8]:
        shape = inputs.shape
        with self._run_stage(Stage.DECODE), self._decode_tiled(shape, tile):
            scaled = self._unpack(self._take_latents(latents), shape)
            video = self.pipe.vae.decode(scaled, return_dict=False)[0]
            if not is_first():
                return np.zeros((0, shape.num_frames, shape.height, shape.width, 3), np.uint8)
            return round_pixels(self.pipe.video_processor.postprocess_video(video, output_type="pt"))

    def _decode_tiled(self, shape: Shape, tile: int | None) -> AbstractContextManager[None]:
        """Have the VAE decode in tiles inside the context, unless `tile` is None."""
        return decode_tiled(self.pipe.vae, tile)

    def _select_frame(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        return latents[:, :, latents.shape[2] // 2]

    def _decode_frame(self, latents: torch.Tensor) -> torch.Tensor:
        scaled = self._unpack(self._make_video(latents), _ONE_FRAME)
        video: torch.Tensor = self.pipe.vae.decode(scaled, return_dict=False)[0]
        return video[:, :, 0]

    def _make_video(self, latents: torch.Tensor) -> torch.Tensor:
        """Make latents of a video of one frame, in the form in which D has them."""
        return latents[:, :, None]

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Unpack latents as the VAE decodes them, (num_outputs, channels, latent frames, height / 8, width / 8), scaled
        by one factor unless a family overrides this."""
        scaled: torch.Tensor = latents / self.pipe.vae.config.scaling_factor
        return scaled

    def _draw_noise(self, inputs: GenerationInputs, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """Draw the first latents of all outputs as the stock pipeline does."""
        shape = inputs.shape
        latents: torch.Tensor = self._prepare_latents(
            inputs.num_outputs,
            self._count_channels(),
            height=shape.height,
            width=shape.width,
            num_frames=shape.num_frames,
            dtype=dtype,
            device=self.device,
            generator=generator,
        )
        return latents

    def _prepare_latents(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Call the stock pipeline's `prepare_latents`."""
        latents: torch.Tensor = self.pipe.prepare_latents(*arguments, **options)
        return latents

    def _count_channels(self) -> int:
        """The channels of the latents. They are the transformer's input channels, where it takes no other inputs."""
        channels: int = self.pipe.transformer.config.in_channels
        return channels


def read_statistic(vae: Any, name: str, like: torch.Tensor) -> torch.Tensor:
    """Read a statistic of the latents, one number per channel, from the VAE's config: (1, channels, 1, 1, 1)."""
    return torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1).to(like.device, like.dtype)
