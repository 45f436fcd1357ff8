"""The facts about one pipeline family that need no loaded model. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tridentserve.models.number_formats import VAE, NumberFormat
from tridentserve.requests import PIXELS_PER_TOKEN, ImageStart, Shape
from tridentserve.stages import Stage

# `stretch`: the image takes the proportions of the output. `crop`: it is scaled to cover the output, and its middle is
# kept. `area`: it keeps its own proportions, whatever the size of the output, and has `image_pixels` at most.
ImageFit = Literal["stretch", "crop", "area"]


@dataclass(frozen=True, slots=True)
class StartRules:
    """The rules by which a family that makes images from text alone starts from an image."""

    strength: float = 0.6
    """The default strength of the stock pipeline without a mask."""
    masked_strength: float = 0.6
    """That of the stock pipeline with a mask."""
    rounds_down: bool = False
    """See `ImageStart.rounds_down`."""

    def make_start(self, strength: float | None, has_mask: bool) -> ImageStart:
        """The start of a request with this strength, or with the default."""
        default = self.masked_strength if has_mask else self.strength
        return ImageStart(default if strength is None else strength, has_mask, self.rounds_down)


@dataclass(frozen=True, slots=True)
class Family:
    """One family of `diffusers` pipelines."""

    name: str
    """The family's name in the service. Its adapter and its tiny model are modules of this name."""
    pipeline_class: str
    """The class of diffusers that `model_index.json` names."""
    size_multiple: int
    """Height and width must be multiples of this many pixels (the VAE's factor times the patch size)."""
    default_steps: int
    """Inference steps of a request that names none."""
    default_guidance_scale: float
    """The guidance scale of a request that names none."""
    components: Mapping[Stage, tuple[str, ...]]
    """The components that each stage needs, by their names in `model_index.json`. A VAE that encodes input images and
    decodes outputs belongs to two stages, and each of them holds its own."""
    size_factors: tuple[tuple[str, str, int], ...] = ()
    """The config entries whose product is `size_multiple`, where models differ in it: component, key, and the value
    that diffusers assumes where the key is absent. The last value of a list counts."""
    number_formats: Mapping[str, NumberFormat] = field(default_factory=dict)
    """The number formats on a GPU of the components that the published recipe of the family (the example in the
    documentation of its pipeline) loads in another one than `COMMON_FORMAT`."""
    upcasts_vae: bool = False
    """True where the stock pipeline computes in float32 with a VAE that is loaded in float16, if its config says
    `force_upcast`."""
    optional: frozenset[str] = frozenset()
    """The components that a model folder may leave out."""
    options: tuple[str, ...] = ()
    """Entries of `model_index.json` that are settings of the pipeline and not components."""
    shares_tokens: bool = True
    """True where members of a group share out the tokens of D. U-Nets cannot, and share out passes alone."""
    caches_steps: bool = True
    """True where a step can take over what an earlier one found (`quality` of a request): all blocks of a transformer
    but the first, which it cannot where blocks at both ends are connected, or patches in the transformer blocks of a
    U-Net."""
    caches_patches: bool = False
    """True where it does so by patches of a U-Net."""
    packs_sizes: bool = False
    """True where requests of different sizes can share the steps of D, as one packed sequence or as patches."""
    loras: bool = True
    """True where diffusers loads LoRAs for this family."""
    unguided_scale: float = 1.0
    """Guidance takes a second pass at guidance scales above this one."""
    negative_prompt: bool = True
    """True where a negative prompt has an effect. It has none where guidance is an embedding."""
    own_fields: frozenset[str] = frozenset()
    """The fields of a request that this family gives a meaning, and most others do not: `true_cfg_scale`,
    `guidance_scale_2` (models with two transformers only), `flow_shift` and `strength`."""
    min_images: int = 0
    """The fewest input images that a request brings: 1 for edits and for image to video."""
    max_images: int = 0
    """The most input images that a request may bring."""
    image_tokens: bool = False
    """True where D has the tokens of the input images beside those of the output."""
    image_pixels: int | None = None
    """About so many pixels an input image has in D whatever the size of the output, whose proportions one takes; with
    `image_fit: area` so many at most. None: it has the size of the output."""
    min_image_side: int = 1
    """The smallest width and height of an input image, in pixels, that the stock pipeline takes."""
    max_image_proportion: int | None = None
    """The longer side of an input image is at most so many times as long as the shorter one. None: the family takes
    whatever the service takes."""
    image_fit: ImageFit | None = None
    """The way in which E resizes input images, where E needs nothing else of them, so that the API can resize them
    before. None: E needs images as they are, or takes none."""
    takes_mask: bool = False
    """True where a request may bring a mask of the part of its input image that is painted anew, and must where it must
    bring an image."""
    image_start: StartRules | None = None
    """The rules by which requests start from an image, of models for which the configuration allows it
    (`with_image_start`). None: the family knows nothing of it."""
    frame_multiple: int | None = None
    """A video has one frame more than a multiple of this number. None: the family makes images only."""
    default_shape: Shape | None = None
    """The shape of a video whose request names none."""
    default_fps: int | None = None
    """Frames per second of a video whose request names none."""
    whole: bool = False
    """True where the stock pipeline is called as a whole, in D, on one worker. Such a request is not stopped between
    steps to go on later, and shares its steps with no other. E and C only pass on what they get."""
    absent_fields: frozenset[str] = frozenset()
    """The fields of a request that the pipeline has no parameter for. Others are refused where it is served whole."""
    one_size: bool = False
    """True where some models of the family make videos of one size only: then `default_shape` is the default for
    input images of all proportions. Otherwise the default follows the proportions of the input image."""

    @property
    def takes_image(self) -> bool:
        """True where requests may bring an input image."""
        return self.max_images > 0

    @property
    def needs_image(self) -> bool:
        """True where every request brings an input image."""
        return self.min_images > 0

    @property
    def starts_from_image(self) -> bool:
        """True where requests may start from an image by `image_start`."""
        return self.image_start is not None and self.takes_image

    @property
    def needs_mask(self) -> bool:
        """True where every request brings a mask."""
        return self.takes_mask and self.needs_image

    def with_image_start(self) -> Family:
        """The family as a model is served whose requests may start from an image: E has the VAE too. A family without
        `image_start` stays as it is."""
        if self.image_start is None:
            return self
        encode = (*self.components[Stage.ENCODE], VAE)
        return replace(
            self,
            components={**self.components, Stage.ENCODE: encode},
            max_images=1,
            image_fit="stretch",
            takes_mask=True,
            own_fields=self.own_fields | {"strength"},
        )

    def count_image_tokens(self, shape: Shape) -> float:
        """Count the tokens of the input images that D has of every request, as `Shape.tokens` counts those of the
        output."""
        return self.min_images * self._count_tokens_each(shape)

    def compute_token_ratio(self, shape: Shape, sizes: Sequence[tuple[int, int]]) -> float:
        """The tokens of D with input images of these widths and heights, relative to those with as few images as the
        family takes: the number on which profiles rest."""
        fewest = shape.tokens + self.count_image_tokens(shape)
        if self.image_fit == "area":
            multiple = self.size_multiple
            pixels = sum(width // multiple * (height // multiple) * multiple**2 for width, height in sizes)
            return (shape.tokens + pixels / PIXELS_PER_TOKEN) / fewest
        return (shape.tokens + len(sizes) * self._count_tokens_each(shape)) / fewest

    def _count_tokens_each(self, shape: Shape) -> float:
        if not self.image_tokens:
            return 0.0
        return shape.tokens if self.image_pixels is None else self.image_pixels / PIXELS_PER_TOKEN

    def allows_frames(self, num_frames: int) -> bool:
        """True when an output can have this many frames."""
        if self.frame_multiple is None:
            return num_frames == 1
        return num_frames >= 1 and (num_frames - 1) % self.frame_multiple == 0
