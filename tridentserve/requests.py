"""What is asked for: the metadata the scheduler plans with, and the content only workers see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# What a client gets: a PNG file per picture; an MP4 file, or the frames as an array, per video.
OutputFormat = Literal["png", "mp4", "frames"]

# The LoRA, and the id of a request that must run alone.
BatchKey = tuple[str | None, str | None]


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Size of one output in pixels and frames (a picture has one frame)."""

    height: int
    width: int
    num_frames: int = 1

    @property
    def pixels(self) -> int:
        """Pixels of one frame."""
        return self.height * self.width

    @property
    def tokens(self) -> float:
        """Processing length l_D up to a constant of the family: one token per 16x16 pixels and latent frame
        (VAEs compress 8x in space and 4x in time, transformers patch 2x2)."""
        return self.pixels / 256 * ((self.num_frames - 1) / 4 + 1)

    def __str__(self) -> str:
        frames = f"x{self.num_frames}" if self.num_frames > 1 else ""
        return f"{self.width}x{self.height}{frames}"


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request as the scheduler sees it: no prompt, no tensor.

    `slo_s` counts from arrival; None means the service's default (a multiple of the latency at the optimal degrees).
    `lora`: the name of the LoRA that it is denoised with; only requests with the same one share forward passes of D.
    `alone`: it shares no forward pass at all; a batch that it was in has failed.
    `waited_s`: how long ago it had come in whole when the scheduler was told of it, which makes it no other request.
    """

    request_id: str
    model: str
    shape: Shape
    num_inference_steps: int
    num_outputs: int = 1
    slo_s: float | None = None
    lora: str | None = None
    alone: bool = False
    waited_s: float = field(default=0.0, compare=False)

    @property
    def batch_key(self) -> BatchKey:
        """Equal for those requests of one model and size that may be in a batch together."""
        return self.lora, self.request_id if self.alone else None


@dataclass(frozen=True, slots=True)
class GenerationInputs:
    """The content of a request, as the stages of a pipeline take it. It travels to workers beside the plan.

    `fps`: frames per second of a video, None for a picture. `lora`: a file of the model folder's `loras/`, by its name
    without the ending. `image`: the picture that a family with `takes_image` starts from: a PNG file, RGB, any size.
    `seed_drawn`: the client left the seed to the service; who asks so again means the same request."""

    prompt: str
    shape: Shape
    num_inference_steps: int
    guidance_scale: float
    seed: int
    negative_prompt: str = ""
    num_outputs: int = 1
    fps: float | None = None
    output_format: OutputFormat = "png"
    lora: str | None = None
    image: bytes | None = field(default=None, repr=False)
    seed_drawn: bool = field(default=False, compare=False)
