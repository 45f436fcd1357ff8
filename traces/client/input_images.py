"""The pictures that a replay sends to models that start from one: a trace itself holds none."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

# Of larger requests the picture is smaller than the result: nobody uploads hundreds of megapixels.
_MAX_SIDE = 1024
_SPOTS = 8


def source_picture(seed: int, width: int, height: int) -> str:
    """Soft spots of colour, always the same for one seed and size, as a JPEG file in base64; of `width` x `height` or,
    where a side would be longer than 1024 pixels, scaled down."""
    scale = min(1.0, _MAX_SIDE / max(width, height))
    spots = np.random.default_rng(seed).integers(0, 256, (_SPOTS, _SPOTS, 3), dtype=np.uint8)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    buffer = io.BytesIO()
    Image.fromarray(spots).resize(size, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return base64.b64encode(buffer.getvalue()).decode()
