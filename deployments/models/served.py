"""The served models as the API knows them: family, limits and defaults, without loading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, isqrt, sqrt
from typing import Any, Literal, get_args

from deployments.config.models import Limits, ModelArgs, RequestDefaults
from tridentserve.errors import ModelFolderError
from tridentserve.models.families import FAMILIES
from tridentserve.models.family import Family
from tridentserve.models.lora_files import LoraFile, list_loras
from tridentserve.models.model_folder import MODEL_INDEX, detect_family, read_json
from tridentserve.models.whole.whole_family import LACKS
from tridentserve.requests import Quality, Shape

_DEFAULT_SIDE = 1024
_DEFAULT_FPS = 16
# The qualities that requests name: ours, and those of other servers' clients.
AskedQuality = Literal["auto", "exact", "high", "fast", "medium", "low", "standard", "hd", "lossless"]
QUALITIES_BY_NAME: Mapping[str, Quality] = {
    **{quality: quality for quality in get_args(Quality)},
    "medium": "high",
    "low": "fast",
    "hd": "exact",
    "lossless": "exact",
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as clients see it, of a family that makes images or of one that makes videos."""

    name: str
    family: Family
    limits: Limits
    loras: tuple[LoraFile, ...] = ()
    """The LoRAs that a request may name."""
    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    """Values for requests that name none, where they differ from the family's."""

    is_warming: bool = False
    """True while its workers run what they will be asked for, before anybody has asked. It takes requests."""

    origin: str | None = None
    """The id on the hub, or else the folder. None for a tiny model, which the start makes."""

    has_two_experts: bool = False
    """True where one transformer does the noisy first steps and another one the rest."""

    @property
    def own_fields(self) -> frozenset[str]:
        """The fields of a request that have a meaning for this model, and none for most others."""
        return self.family.own_fields if self.has_two_experts else self.family.own_fields - {"guidance_scale_2"}

    @property
    def caches_steps(self) -> bool:
        """True where requests may have a `quality` other than `exact`."""
        return self.family.caches_steps and not self.has_two_experts

    def find_lora(self, name: str) -> LoraFile | None:
        """The LoRA of this name; None where the model has none."""
        return next((lora for lora in self.loras if lora.name == name), None)

    def choose_quality(self, asked: AskedQuality) -> Quality:
        """The quality in which a request is made: `exact` where the model makes no other."""
        if not self.caches_steps:
            return "exact"
        return QUALITIES_BY_NAME.get(asked, self.defaults.quality)

    @property
    def makes_videos(self) -> bool:
        return self.family.frame_multiple is not None

    @property
    def takes_image(self) -> bool:
        """True if requests of the model may start from images."""
        return self.family.takes_image

    @property
    def needs_image(self) -> bool:
        """True if all requests of the model start from an image."""
        return self.family.needs_image

    @property
    def max_images(self) -> int:
        """The most input images of a request."""
        most, limit = self.family.max_images, self.limits.max_images
        return most if limit is None else min(most, limit)

    def allows_mask(self, has_mask: bool) -> bool:
        """True if an image may come to the model with a mask, or without one."""
        return self.family.takes_mask if has_mask else not self.family.needs_mask

    def edits(self, num_images: int) -> bool:
        """True if the model makes images from so many input images."""
        return not self.makes_videos and self.takes_image and num_images <= self.max_images

    def allows(self, shape: Shape) -> bool:
        """True where a request may ask for this shape."""
        limits, sides = self.limits, (shape.height, shape.width)
        return (
            min(sides) >= limits.min_side
            and max(sides) <= limits.max_side
            and not any(side % self.family.size_multiple for side in sides)
            and shape.num_frames in self.frame_numbers
            and shape.pixels <= self.get_max_pixels(shape.num_frames)
        )

    def get_max_pixels(self, num_frames: int = 1) -> int:
        """The most pixels of an image, or of each frame of a video with `num_frames`."""
        limits = self.limits
        return min(limits.max_pixels, limits.max_pixel_frames // num_frames) if self.makes_videos else limits.max_pixels

    @property
    def smallest(self) -> Shape:
        """The smallest square that may be requested. It is larger than `largest` when the limits leave no size."""
        multiple = self.family.size_multiple
        side = -(-self.limits.min_side // multiple) * multiple
        return Shape(side, side)

    @property
    def largest(self) -> Shape:
        """The largest square that may be requested."""
        return self._find_largest_square(self.get_max_pixels())

    @property
    def longest(self) -> Shape:
        """The shape whose denoising step takes longest of all that may be requested: the size with the most pixels (at
        least the largest square), for a video together with its frames."""
        return max(map(self._find_most_pixels, self.frame_numbers), key=_estimate_tokens)

    def _find_largest_square(self, max_pixels: int) -> Shape:
        side = min(self.limits.max_side, isqrt(max_pixels))
        side -= side % self.family.size_multiple
        return Shape(side, side)

    def _find_most_pixels(self, num_frames: int) -> Shape:
        """The shape with the most pixels that `num_frames` frames may have; one without pixels when there is none."""
        multiple, limits, max_pixels = self.family.size_multiple, self.limits, self.get_max_pixels(num_frames)
        best = self._find_largest_square(max_pixels)
        widest = min(limits.max_side, max_pixels // limits.min_side)
        for width in range(best.width + multiple, widest + 1, multiple):
            height = max_pixels // width // multiple * multiple
            if height >= limits.min_side and width * height > best.pixels:
                best = Shape(height=height, width=width)
        return Shape(best.height, best.width, num_frames) if best.width >= limits.min_side else Shape(0, 0)

    @property
    def frame_numbers(self) -> range:
        """The numbers of frames that an output may have: 1, and for videos more, in the family's pattern."""
        last = self.limits.max_frames if self.makes_videos else 1
        return range(1, last + 1, self.family.frame_multiple or 1)

    def choose_frames_near(self, num_frames: float) -> int:
        """The nearest number of frames in the family's pattern (of two, the smaller one)."""
        multiple = self.family.frame_multiple or 1
        return 1 + multiple * max(0, ceil((num_frames - 1) / multiple - 0.5))

    @property
    def default_shape(self) -> Shape:
        """The shape for a request that names no size and no length: the family's where the limits allow it."""
        wanted, limits = self.family.default_shape or Shape(_DEFAULT_SIDE, _DEFAULT_SIDE), self.limits
        sides = (wanted.height, wanted.width)
        if min(sides) < limits.min_side or max(sides) > limits.max_side or wanted.pixels > self.get_max_pixels():
            side = self.choose_side_near(min(sides))
            wanted = Shape(side, side, wanted.num_frames)
        most = min(wanted.num_frames, limits.max_frames, limits.max_pixel_frames // wanted.pixels)
        return Shape(wanted.height, wanted.width, max(n for n in self.frame_numbers if n <= max(1, most)))

    @property
    def usual_shape(self) -> Shape:
        """The shape of a request that names no size, in which an image has `default_side`."""
        return self.default_shape if self.makes_videos else Shape(self.default_side, self.default_side)

    @property
    def default_fps(self) -> int:
        """Frames per second of a video whose request names none."""
        return self.defaults.fps or self.family.default_fps or _DEFAULT_FPS

    @property
    def default_side(self) -> int:
        """Width and height in pixels for a request that names no size, where the limits allow it."""
        trained = self.family.default_shape
        return self.choose_side_near(self.defaults.side or (_DEFAULT_SIDE if trained is None else trained.height))

    def choose_side_near(self, side: int) -> int:
        """Width and height of the allowed square that is nearest to `side` from below, else of the smallest."""
        below = side - side % self.family.size_multiple
        return max(self.smallest.width, min(below, self.largest.width))

    def choose_shape_like(self, width: int, height: int) -> Shape:
        """The shape for a video that starts from an image of this size when its request names none: `default_shape`,
        but with about the image's aspect ratio where the family allows it, and at most as many pixels."""
        default = self.default_shape
        if self.family.one_size:
            return default
        scale = sqrt(default.pixels / (width * height))
        size = self._scale_into_limits(width * scale, height * scale, default.pixels)
        return replace(size, num_frames=default.num_frames)

    def choose_size_near(self, width: int, height: int) -> Shape:
        """The allowed size for a result that is like an image of this size: its own where it is allowed; else scaled
        into the limits, with about its aspect ratio, and rounded to the family's multiple."""
        return self._scale_into_limits(width, height, self.get_max_pixels())

    def _scale_into_limits(self, width: float, height: float, max_pixels: int) -> Shape:
        multiple, limits = self.family.size_multiple, self.limits
        shrink = min(1.0, limits.max_side / max(width, height), sqrt(max_pixels / (width * height)))
        scale = max(shrink, self.smallest.width / min(width, height))
        most = max(self.smallest.width, limits.max_side - limits.max_side % multiple)
        longer, shorter = (
            min(most, max(self.smallest.width, round(side * scale / multiple) * multiple))
            for side in sorted((width, height), reverse=True)
        )
        # Rounding up may have made too much of it. A square stays one.
        while longer * shorter > max_pixels and longer > self.smallest.width:
            longer, shorter = longer - multiple, shorter - (multiple if longer == shorter else 0)
        return Shape(height=longer, width=shorter) if height > width else Shape(height=shorter, width=longer)

    @property
    def default_steps(self) -> int:
        return min(self.defaults.num_inference_steps or self.family.default_steps, self.limits.max_steps)

    @property
    def default_guidance_scale(self) -> float:
        chosen = self.defaults.guidance_scale
        return self.family.default_guidance_scale if chosen is None else chosen

    def _describe_start(self) -> dict[str, float]:
        """The defaults of requests that start from an image which the family can do without."""
        rules = self.family.image_start if self.family.starts_from_image else None
        return {} if rules is None else {"strength": rules.strength, "masked_strength": rules.masked_strength}

    def to_json(self) -> dict[str, Any]:
        multiple, shape = self.family.size_multiple, self.default_shape
        hidden = {"max_images"} if self.takes_image else {"max_images", "max_image_bytes", "max_image_pixels"}
        if self.makes_videos:
            pattern = {"frame_multiple": self.family.frame_multiple}
            size = {"size": f"{shape.width}x{shape.height}", "num_frames": shape.num_frames, "fps": self.default_fps}
        else:
            hidden, pattern = hidden | {"max_frames", "max_pixel_frames"}, {}
            size = {"size": "auto" if self.needs_image else f"{self.default_side}x{self.default_side}"}
        return {
            "state": "warming" if self.is_warming else "serving",
            "family": self.family.name,
            **({"pipeline": self.family.pipeline_class, "lacks": list(LACKS)} if self.family.whole else {}),
            "input_modalities": ["text", "image"] if self.takes_image else ["text"],
            "input_images": {"min": self.family.min_images, "max": self.max_images},
            "takes_mask": self.family.takes_mask,
            "needs_mask": self.family.needs_mask,
            "output_modality": "video" if self.makes_videos else "image",
            "loras": [lora.name for lora in self.loras],
            "limits": {**self.limits.model_dump(exclude=hidden), "size_multiple": multiple, **pattern},
            "defaults": {
                **size,
                "num_inference_steps": self.default_steps,
                "guidance_scale": self.default_guidance_scale,
                **self._describe_start(),
            },
        }


def describe_lacks(model: ModelArgs) -> str | None:
    """A sentence about what a model that is served whole lacks; None for one of a family. Raises
    `ModelFolderError`."""
    family = find_family(model)
    if not family.whole:
        return None
    return (
        f"{model.name} is of the class {family.pipeline_class}, which is no family here: its requests run whole on one "
        f"worker, without {', '.join(LACKS[:-1])} and {LACKS[-1]} (docs/models.md)"
    )


def build_served_models(models: list[ModelArgs]) -> Mapping[str, ServedModel]:
    """The models by name, in the order of the configuration (the first is the default). Raises `ModelFolderError`."""
    return {model.name: build_served_model(model) for model in models}


def build_served_model(model: ModelArgs) -> ServedModel:
    """The model of one entry of the configuration. Raises `ModelFolderError`."""
    family = find_family(model)
    loras = list_loras(model.name, model.folder) if model.folder is not None and family.loras else ()
    origin = model.path if model.hub_model is not None else model.folder
    return ServedModel(
        model.name,
        family,
        model.limits,
        loras,
        model.defaults,
        origin=None if origin is None else str(origin),
        has_two_experts=_has_two_experts(model),
    )


def _has_two_experts(model: ModelArgs) -> bool:
    """Read from `model_index.json` whether the model changes its transformer at some step. Tiny ones do not."""
    return model.folder is not None and read_json(model.folder / MODEL_INDEX).get("boundary_ratio") is not None


def find_family(model: ModelArgs) -> Family:
    """The family of a model, read from its `model_index.json` unless it is a tiny one; with an image to start from if
    the limits allow one. Raises `ModelFolderError`."""
    if model.tiny is None and model.folder is None:
        raise ModelFolderError(f"{model.hub_model} is not on this machine yet; the start of the service fetches it")
    family = FAMILIES[model.tiny or ""] if model.folder is None else detect_family(model.folder)
    return family.with_image_start() if model.limits.max_images else family


def _estimate_tokens(shape: Shape) -> float:
    return shape.tokens
