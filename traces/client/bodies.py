"""The bodies that a replay sends. A trace holds no input images, so they are drawn from the request's seed."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from traces.client.preflight import Served
from traces.requests import TraceRequest

# An input image is smaller than a very large output: users do not upload hundreds of megapixels.
_MAX_SIDE = 1024
_SPOTS = 8


def build_body(request: TraceRequest, model: Served, service_request_id: str) -> dict[str, Any]:
    """The JSON body of a request for this model, an image or a video. Draws the input image where the model needs one,
    which takes milliseconds."""
    is_video = model.gives_video(request)
    body: dict[str, Any] = {
        "model": model.name,
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt or None,
        "size": f"{request.width}x{request.height}",
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "quality": request.quality,
        "seed": request.seed,
        "slo_ms": request.slo_ms,
        "on_late": request.on_late,
        "priority": request.priority,
        "request_id": service_request_id,
    }
    if is_video:
        body |= {"num_frames": request.num_frames, "fps": request.fps}
    else:
        body["response_format"] = "b64_json"
    if model.needs_image:
        image = draw_input_image(request.seed or 0, request.width, request.height)
        body["input_reference" if is_video else "image"] = image
    return {name: value for name, value in body.items() if value is not None}


def draw_input_image(seed: int, width: int, height: int) -> str:
    """Soft spots of color as a JPEG file in base64, always the same for one seed and size. The image has `width` x
    `height` pixels, or is scaled down to a longest side of 1024 pixels."""
    scale = min(1.0, _MAX_SIDE / max(width, height))
    spots = np.random.default_rng(seed).integers(0, 256, (_SPOTS, _SPOTS, 3), dtype=np.uint8)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    buffer = io.BytesIO()
    Image.fromarray(spots).resize(size, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return base64.b64encode(buffer.getvalue()).decode()
