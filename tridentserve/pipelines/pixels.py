"""Makes pixels of decoded tensors on the device, with the stock pipeline's rounding: bytes are copied, not floats."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def round_pixels(images: torch.Tensor) -> NDArray[np.uint8]:
    """The pixels of images in [0, 1]: (..., channels, height, width) becomes (..., height, width, channels)."""
    rounded = (images.float() * 255).round().to(torch.uint8).movedim(-3, -1).contiguous()
    pixels: NDArray[np.uint8] = rounded.cpu().numpy()
    return pixels
