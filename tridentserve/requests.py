"""Requests: the metadata that the scheduler plans with, and the content that only workers see."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from tridentserve.models.lora_files import LoraUse

# The result that a client gets: a PNG file per image; an MP4 file, or the frames as an array, per video.
OutputFormat = Literal["png", "jpeg", "webp", "mp4", "frames"]

# Behaviour of a request that is predicted to be late when it arrives.
OnLate = Literal["wait", "refuse", "degrade"]
# The closeness of a result to what the stock pipeline would give; all but `exact` leave out work in denoising steps.
Quality = Literal["exact", "high", "fast"]
# A request counts so many times as much as one of the next lower priority, up to so many steps either way.
_PRIORITY_FACTOR, _MOST_STEPS = 4.0, 5
# Priorities go so far either way.
MAX_PRIORITY = 1000

# The pixels of a frame that make a token.
PIXELS_PER_TOKEN = 256

# The quality, the ratio of tokens, and the id of a request that must run alone.
BatchKey = tuple[Quality, float, str | None]


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Size of one output in pixels and frames (an image has one frame)."""

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
        return self.pixels / PIXELS_PER_TOKEN * ((self.num_frames - 1) / 4 + 1)

    @classmethod
    def parse(cls, text: str) -> Shape:
        """The shape that a text made by `str` stands for."""
        width, height, *frames = (int(number) for number in text.split("x"))
        return cls(height, width, *frames)

    def __str__(self) -> str:
        frames = f"x{self.num_frames}" if self.num_frames > 1 else ""
        return f"{self.width}x{self.height}{frames}"


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request without its content: no prompt, no tensor."""

    request_id: str
    model: str
    shape: Shape
    num_inference_steps: int
    """The denoising steps that are computed (`GenerationInputs.computed_steps`)."""
    num_outputs: int = 1
    slo_s: float | None = None
    """Seconds from arrival to the deadline; None: the service's default, a multiple of the latency at the optimal
    degrees."""
    loras: tuple[str, ...] = ()
    """The LoRAs by `LoraFile.key`. Workers that hold them come before others; batches may have several."""
    alone: bool = False
    """It shares no forward pass, because a batch that it was in has failed."""
    whole: bool = False
    """All its steps run in one plan of D, which other requests do not share, and which is stopped only for good: the
    stock pipeline of its model is called as a whole."""
    priority: int = 0
    """Requests of a higher priority go first where the policy weighs requests."""
    on_late: OnLate = "wait"
    """`refuse`: it ends at its arrival, without a result, where it is predicted to end after its deadline. `degrade`:
    it has fewer steps where it is predicted to end in time with them only."""
    quality: Quality = "exact"
    """Steps of a request that need not be exact may take over what earlier ones found."""
    cheaper_quality: Quality | None = None
    """The quality to which `on_late: degrade` may lower it before it takes steps away; None where the model has
    none."""
    token_ratio: float = 1.0
    """Tokens of D with the request's input images, relative to those of a request of its size with as few as its model
    takes (`Family.compute_token_ratio`). Only requests with the same one share forward passes of D."""
    step_share: float = field(default=1.0, compare=False)
    """The expected time of its steps, relative to steps that are computed whole. The scheduler sets it."""
    waited_s: float = field(default=0.0, compare=False)
    """Seconds from its arrival until the scheduler got it. Requests that differ only in this are equal."""

    @property
    def weight(self) -> float:
        """Its weight beside that of a request of priority 0."""
        return float(_PRIORITY_FACTOR ** min(max(self.priority, -_MOST_STEPS), _MOST_STEPS))

    @property
    def batch_key(self) -> BatchKey:
        """Equal for requests of one model and size that may be in a batch together."""
        return self.quality, self.token_ratio, self.request_id if self.alone or self.whole else None


@dataclass(frozen=True, slots=True)
class ImageStart:
    """The denoising step at which a request starts from its image, mixed with as much noise as that step has."""

    strength: float
    """The part of the steps that is computed, above 0 and at most 1."""
    has_mask: bool = False
    """True where only the masked part of the image is painted anew."""
    rounds_down: bool = False
    """True where the stock pipeline rounds the number of steps down, false where it rounds up."""

    def count_steps(self, num_inference_steps: int) -> int:
        """The number of steps that are computed of so many, as the stock pipelines' `get_timesteps` has it; it may be
        0."""
        wanted = num_inference_steps * self.strength
        return int(wanted) if self.rounds_down else num_inference_steps - int(num_inference_steps - wanted)

    def find_inference_steps(self, num_steps: int, most: int) -> int:
        """The largest number of inference steps, at most `most`, of which `num_steps` are computed. `most` inference
        steps have at least so many."""
        return next(number for number in range(most, 0, -1) if self.count_steps(number) <= num_steps)


@dataclass(frozen=True, slots=True)
class GenerationInputs:
    """The content of a request. Workers get it with the plan."""

    prompt: str
    shape: Shape
    num_inference_steps: int
    """The steps from noise alone. With a `start` not all of them are computed (`computed_steps`)."""
    guidance_scale: float
    seed: int
    negative_prompt: str = ""
    num_outputs: int = 1
    fps: float | None = None
    """Frames per second of a video; None for an image."""
    output_format: OutputFormat = "png"
    compression: int | None = None
    """Quality of JPEG and WebP files, 0 to 100; None for the default."""
    loras: tuple[LoraUse, ...] = ()
    """The LoRAs, in the order in which their changes are added."""
    image: bytes | None = field(default=None, repr=False)
    """The input image, or the first of several, of a model that takes images: a PNG file, RGB, of any size."""
    more_images: tuple[bytes, ...] = field(default=(), repr=False)
    """The input images after the first, in the same form."""
    mask: bytes | None = field(default=None, repr=False)
    """The mask of the input image, for a family with `takes_mask`: a PNG file, grey, white where to paint anew."""
    start: ImageStart | None = None
    """The step at which the request starts from its image; None for one that starts from noise."""
    token_ratio: float = 1.0
    """See `RequestSpec.token_ratio`."""
    guidance_scale_2: float | None = None
    """The guidance scale of the steps of the second of two transformers (Wan 2.2); None for `guidance_scale`."""
    flow_shift: float | None = None
    """The shift of the noise levels of flow matching, for a video; None for that of the model's scheduler."""
    quality: Quality = "exact"
    """See `RequestSpec.quality`."""
    partial_images: int = field(default=0, compare=False)
    """Previews that a client which watches the request wants of it, at steps in equal distances."""
    preview_interval_s: float | None = field(default=None, compare=False)
    """Seconds between two previews at least, for a client that wants as many as there are; None for no such client."""
    seed_drawn: bool = field(default=False, compare=False)
    """The service drew the seed, because the client gave none."""
    id_drawn: bool = field(default=False, compare=False)
    """The service drew the request id, so that no other request can have it."""

    @property
    def images(self) -> tuple[bytes, ...]:
        """All input images."""
        return () if self.image is None else (self.image, *self.more_images)

    @property
    def files(self) -> tuple[bytes, ...]:
        """All input images, and the mask."""
        return self.images if self.mask is None else (*self.images, self.mask)

    def without_images(self) -> GenerationInputs:
        """The same content for workers that do not encode, and for keeping: without images and mask."""
        return replace(self, image=None, more_images=(), mask=None) if self.files else self

    @property
    def computed_steps(self) -> int:
        """The denoising steps that are computed."""
        return self.num_inference_steps if self.start is None else self.start.count_steps(self.num_inference_steps)

    def with_computed_steps(self, num_steps: int) -> GenerationInputs:
        """The same content with fewer computed steps."""
        if self.start is not None:
            num_steps = self.start.find_inference_steps(num_steps, self.num_inference_steps)
        return replace(self, num_inference_steps=num_steps)

    @property
    def wants_previews(self) -> bool:
        return self.partial_images > 0 or self.preview_interval_s is not None

    @property
    def preview_format(self) -> OutputFormat:
        """The format of previews: that of the result where it is an image."""
        return "png" if self.output_format in ("mp4", "frames") else self.output_format
