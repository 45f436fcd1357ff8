"""The models of the configuration: `models[]` and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from deployments.config.base import Args, Name, make_absolute, make_config_error, make_option
from tridentserve.byte_sizes import MIB
from tridentserve.errors import ConfigError
from tridentserve.hub.hub_model import DEFAULT_REVISION, HubModel, is_hub_id
from tridentserve.models.families import FAMILIES
from tridentserve.models.kernels import Attention, Kernels
from tridentserve.models.model_folder import find_shipped_model, list_shipped_models
from tridentserve.models.number_formats import NumberFormat, NumberFormats
from tridentserve.models.step_cache import StepCache
from tridentserve.requests import Quality
from tridentserve.scheduling.estimation.expected_times import DEFAULT_SLO_SCALE

_TINY_IMAGES = {"max_side": 1024, "max_pixels": 1024 * 1024}
_TINY_VIDEOS = {"max_side": 256, "max_pixels": 128 * 128, "max_frames": 33, "max_pixel_frames": 128 * 128 * 17}
# Most frames per second that a video may have.
MAX_FPS = 120
CellNumber = Annotated[int, Field(ge=0)]


class Limits(Args):
    """Limits of a model's requests. A request beyond it is refused before anything is made for it."""

    min_side: int = Field(default=64, ge=16, description="Smallest width and height, in pixels.")
    max_side: int = Field(default=2048, ge=16, description="Largest width and height, in pixels.")
    max_pixels: int = Field(default=2048 * 2048, ge=256, description="Largest product of width and height, in pixels.")
    max_steps: int = Field(default=100, ge=1, description="Most denoising steps.")
    max_outputs: int = Field(default=4, ge=1, description="Most images or videos of one request.")
    max_frames: int = Field(default=129, ge=1, description="Most frames of a video.")
    max_pixel_frames: int = Field(
        default=1280 * 720 * 129, ge=256, description="Largest product of width, height and frames of a video."
    )
    max_prompt_chars: int = Field(
        default=4096, ge=1, description="Most characters of the prompt, and of the negative prompt."
    )
    max_images: int | None = Field(
        default=None,
        ge=1,
        description="Most input images of one request; without it as many as the model's family takes. 1 lets requests "
        "of some families that make images from text start from an image "
        "([models.md](models.md#image-to-image-and-inpainting)), for which workers of E hold the VAE too.",
    )
    max_image_bytes: int = Field(
        default=20 * MIB,
        ge=1,
        description="Most bytes of the files of all input images of one request, of models that take images.",
    )
    max_image_pixels: int = Field(
        default=4096 * 4096, ge=1, description="Most pixels (width times height) of all input images of one request."
    )


class RequestDefaults(Args):
    """Values for requests of a model that name none."""

    side: int | None = Field(
        default=None,
        ge=1,
        description="Width and height of an image in pixels, within the limits; without it 1024. It has no effect on "
        "models that make videos.",
    )
    num_inference_steps: int | None = Field(
        default=None, ge=1, description="Denoising steps; without it those of the model's family."
    )
    guidance_scale: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Guidance scale, such as 1 for a model that was distilled to do without; without it that of the "
        "model's family.",
    )
    quality: Quality = Field(
        default="exact",
        description="Quality of a request that names none: `exact`, or `high` or `fast`, whose denoising steps may "
        "take over what earlier ones found.",
    )
    fps: int | None = Field(
        default=None,
        ge=1,
        le=MAX_FPS,
        description="Frames per second of a video; without it those of the model's family. It has no effect on models "
        "that make images.",
    )


def _locate(value: Any) -> Path | str:
    """The absolute path of a folder; an id of the hub, which is no folder here, stays a text."""
    if not isinstance(value, Path | str):
        raise make_config_error("", "name a folder, or a model of the hub by its id")
    is_of_hub = isinstance(value, str) and is_hub_id(value) and not Path(value).is_dir()
    return value if is_of_hub else make_absolute(Path(value))


_Formats = NumberFormat | dict[Literal["E", "D", "C"], NumberFormat] | None


def _check_formats(value: Any) -> Any:
    """A number format, or a mapping from letters of stages to formats, as it was given."""
    try:
        NumberFormats.parse(value)
    except ConfigError as error:
        raise make_config_error("", str(error)) from None
    return value


class ModelArgs(Args):
    """One model. Exactly one of `path` (a model folder, or a model of the hub), `shipped` (a model that lies in the
    package) and `tiny` (a family; made at first start) is given."""

    name: Name = Field(
        description="Name under which requests ask for the model: letters, digits and `. _ -`, with at most one `/`. "
        "Without it the last part of the folder or of the hub's id, such as `FLUX.1-schnell`, with a number where "
        "another model has that name."
    )
    path: Annotated[Path | str, PlainValidator(_locate, json_schema_input_type=str)] | None = Field(
        default=None,
        description="Model folder as diffusers saves it, or the id of a model of the Hugging Face hub, such as "
        "`black-forest-labs/FLUX.1-schnell`, which is fetched at the first start. Exactly one of `path`, `shipped` and "
        "`tiny` is given.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description="Branch, tag or commit of a model of the hub; without it the branch "
        f"`{DEFAULT_REVISION}`. The service finds out its commit once, and stays with it until it is restarted.",
    )
    shipped: str | None = Field(
        default=None,
        description="Name of a model whose weights lie in the package, such as `shapes`. Exactly one of `path`, "
        "`shipped` and `tiny` is given.",
    )
    tiny: str | None = Field(
        default=None,
        description="Family, such as `sd3`, `flux` or `wan`, of a small model with random weights, which is made at "
        "the first start. Exactly one of `path`, `shipped` and `tiny` is given.",
    )
    dtype: Annotated[Any, PlainValidator(_check_formats, json_schema_input_type=_Formats)] = Field(
        default=None,
        description="Number format of the loaded weights, for all stages or by stage: `{E: bfloat16, D: bfloat16, "
        "C: float32}`, where C's is that of the VAE, also in E, and those of E and D may be `int8` "
        "([models.md](models.md#e-and-d-in-int8)). Stages without one have float32 on a CPU, and on a GPU what the "
        "model's family was published with ([models.md](models.md#number-formats)).",
    )
    weights: Literal["auto", "whole", "divided", "streamed"] = Field(
        default="auto",
        description="Part of D's weights that a worker keeps: all of them (`whole`), a shard of each layer, of which "
        "the workers of a group send each other the others just before the layer computes (`divided`), or no layer, "
        "each of which is copied from host memory instead (`streamed`). `auto` is `whole` where they fit a worker with "
        "the activations of `expected_load`, else what takes fewer worker-seconds. `divided` needs "
        "`placement: auto`. Text encoders and VAEs that do not fit are streamed.",
    )
    attention: Attention = make_option(Kernels, "attention")
    compile: bool = make_option(Kernels, "compiled")
    step_cache_high: float = make_option(StepCache, "high")
    step_cache_fast: float = make_option(StepCache, "fast")
    step_cache_max_bytes: int = make_option(StepCache, "max_bytes")
    limits: Limits = Field(
        default=Limits(),
        description="Says what requests of the model may ask for. Without it a tiny model takes what its "
        "profile covers: images of up to 1024x1024, videos of up to 128x128x17.",
    )
    defaults: RequestDefaults = Field(
        default=RequestDefaults(), description="Values for requests of the model that name none."
    )
    profile_as: str | None = Field(
        default=None,
        description="Name of the model in the profile tables; without it `name`, or for a tiny model "
        "without a profile of its own that of another tiny model, at degree 1.",
    )
    slo_scale: float = Field(
        default=DEFAULT_SLO_SCALE,
        gt=0,
        description="Default SLO of requests, as a multiple of their latency at the optimal degrees.",
    )
    window_s: float | None = Field(
        default=None,
        gt=0,
        description="Length of the model's own replanning window, in seconds, as models differ in speed; without it "
        "`replan.window_s`.",
    )
    drain: bool = Field(
        default=False,
        description="The model takes no new requests, finishes those that it has, and stays in memory.",
    )
    cells: list[CellNumber] | None = Field(
        default=None,
        min_length=1,
        description="Numbers of the cells that serve the model, from 0, where `scheduler.cells` is above 1; without it "
        "all. The first model of `models` is in all.",
    )

    @model_validator(mode="after")
    def _check_source(self) -> ModelArgs:
        if sum(source is not None for source in (self.path, self.shipped, self.tiny)) != 1:
            raise make_config_error(
                "path",
                "give exactly one of `path` (a model folder or a model of the hub), `shipped` (one in the package) and "
                "`tiny` (a family)",
            )
        if self.revision is not None and self.hub_model is None:
            raise make_config_error("revision", "only models of the hub have revisions, and `path` is no id of one")
        if self.shipped is not None and self.shipped not in list_shipped_models():
            raise make_config_error(
                "shipped", f"no such model is shipped; there are {', '.join(list_shipped_models())}"
            )
        if self.tiny is not None and self.tiny not in FAMILIES:
            raise make_config_error("tiny", f"unknown family; there are {', '.join(sorted(FAMILIES))}")
        return self

    @model_validator(mode="after")
    def _check_hub_id(self) -> ModelArgs:
        """A misspelt folder must not be looked for in the network."""
        owner, _, name = str(self.path).partition("/")
        if self.hub_model is not None and self.revision is None and Path(owner).is_dir():
            raise make_config_error(
                "path",
                f"there is a folder {owner!r} here, but no {name!r} in it; correct the path, or give `revision: "
                f"{DEFAULT_REVISION}` too if a model of the hub is meant",
            )
        return self

    @property
    def formats(self) -> NumberFormats:
        """The number formats that `dtype` asks for."""
        return NumberFormats.parse(self.dtype)

    @property
    def hub_model(self) -> HubModel | None:
        """The model of the hub that `path` names; None where it names none."""
        return HubModel(self.path, self.revision or DEFAULT_REVISION) if isinstance(self.path, str) else None

    @property
    def folder(self) -> Path | None:
        """The model folder, given or shipped. None for one that the start makes or fetches: of a tiny model, and of a
        model of the hub that is not in the hub's cache here."""
        if self.shipped is not None:
            return find_shipped_model(self.shipped)
        if self.hub_model is not None:
            # Imported here: the other models need nothing of huggingface_hub.
            from tridentserve.hub.cached import find_cached

            return find_cached(self.hub_model)
        return None if self.path is None else Path(self.path)

    @property
    def is_unfetched(self) -> bool:
        """True for a model of the hub of which nothing is known here before it is fetched."""
        return self.hub_model is not None and self.folder is None

    @model_validator(mode="before")
    @classmethod
    def _fit_tiny(cls, values: Any) -> Any:
        """Without limits of its own, a tiny model takes what its shipped profile covers."""
        if isinstance(values, Mapping) and "limits" not in values and values.get("tiny") in FAMILIES:
            makes_videos = FAMILIES[values["tiny"]].frame_multiple is not None
            return {**values, "limits": _TINY_VIDEOS if makes_videos else _TINY_IMAGES}
        return values
