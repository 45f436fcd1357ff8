"""The outputs of a request as stage C decodes them, before they become files. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sound:
    """The sound of videos."""

    samples: NDArray[np.float32]
    """(num_outputs, channels, samples) from -1 to 1; (channels, samples) of a single video."""
    sampling_rate: int
    """Samples of each channel per second."""


@dataclass(frozen=True, slots=True)
class DecodedOutputs:
    """All outputs of one request."""

    pixels: NDArray[np.uint8]
    """(num_outputs, height, width, 3), or (num_outputs, frames, height, width, 3) for videos."""
    sound: Sound | None = None
    """The sound of videos that have one."""

    def list_sounds(self) -> list[Sound | None]:
        """List the sound of each output."""
        if self.sound is None:
            return [None] * len(self.pixels)
        return [Sound(samples, self.sound.sampling_rate) for samples in self.sound.samples]


@dataclass(frozen=True, slots=True)
class SoundVideo:
    """One video with sound, for a caller that asks for arrays and not for a file."""

    frames: NDArray[np.uint8]
    """(frames, height, width, 3)."""
    sound: Sound
