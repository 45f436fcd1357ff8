"""The `args:` of the application in a Serve config file. Unknown keys are errors; messages say which key is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from deployments.config.base import Args, LocalPath, Name, absolute, config_error
from deployments.config.planning import DispatchArgs, LoadArgs, ReplanArgs
from deployments.config.replicas import CheckpointsArgs, ReplicasArgs
from deployments.config.videos import VideosArgs
from dispatch.policies import find_policy
from tridentserve.models import cache
from tridentserve.models.families import FAMILIES
from tridentserve.models.kernels import Attention
from tridentserve.stages import PlacementType

WorkerPlacement = dict[str, PlacementType]


def _table_source(name: str) -> str:
    return str(absolute(Path(name))) if is_table_path(name) else name


def is_table_path(name: str) -> bool:
    """Whether an entry of `profiles` is the path of a CSV file; else it names a table that comes with the package."""
    return name.endswith(".csv")


TableSource = Annotated[str, AfterValidator(_table_source)]


class Limits(Args):
    """The requests of a model. What is outside is refused before anything is made for it."""

    min_side: int = Field(default=64, ge=16, description="pixels, of width and of height")
    max_side: int = Field(default=2048, ge=16, description="pixels, of width and of height")
    max_pixels: int = Field(default=2048 * 2048, ge=256, description="width times height")
    max_steps: int = Field(default=100, ge=1, description="denoising steps")
    max_outputs: int = Field(default=4, ge=1, description="pictures or videos per request")
    max_frames: int = Field(default=129, ge=1, description="of a video")
    max_pixel_frames: int = Field(default=1280 * 720 * 129, ge=256, description="of a video: pixels times frames")
    max_prompt_chars: int = Field(default=4096, ge=1, description="of the prompt, and of the negative prompt")
    max_image_bytes: int = Field(
        default=20 * 2**20, ge=1, description="of the file that an edit or a video starts from"
    )
    max_image_pixels: int = Field(default=4096 * 4096, ge=1, description="of the picture in it: width times height")


class ModelArgs(Args):
    """One model. Exactly one of `path` (a diffusers folder) and `tiny` (a family; made at first start) is given."""

    name: Name = Field(description="what requests call it")
    path: LocalPath | None = Field(default=None, description="a folder saved by diffusers; this or `tiny`")
    tiny: str | None = Field(
        default=None, description="a family, for a small model with random weights; this or `path`"
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="of the loaded weights; None: float32 on a CPU, bfloat16 on a GPU"
    )
    attention: Attention = Field(default="sdpa", description="kernel of the denoising model; sdpa: torch chooses")
    compile: bool = Field(default=False, description="whether its blocks go through torch.compile at their first use")
    limits: Limits = Field(default=Limits(), description="what its requests may ask for")
    profile_as: str | None = Field(default=None, description="its name in the profile tables; None: `name`")
    slo_scale: float = Field(default=2.5, gt=0, description="SLO over the latency at the optimal degrees")
    window_s: float | None = Field(default=None, gt=0, description="its own `replan.window_s`; None: that one")
    drain: bool = Field(default=False, description="it takes no new requests, and stays in memory")

    @model_validator(mode="after")
    def _one_source(self) -> ModelArgs:
        if (self.path is None) == (self.tiny is None):
            raise config_error("path", "give exactly one of `path` (a diffusers folder) and `tiny` (a family)")
        if self.tiny is not None and self.tiny not in FAMILIES:
            raise config_error("tiny", f"unknown family; there are {', '.join(sorted(FAMILIES))}")
        return self

    @property
    def profile_name(self) -> str:
        return self.profile_as or self.name


class ClusterArgs(Args):
    """The devices. One worker owns one GPU, or `cpu_threads` threads of a CPU."""

    nodes: int = Field(default=1, ge=1, description="machines of the Ray cluster that hold workers")
    workers_per_node: int = Field(ge=1, description="one per GPU")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="what workers compute on")
    device_name: str = Field(default="cpu", description="as in the profile tables, such as `NVIDIA L20`")
    memory_mb: int = Field(ge=1, description="of one worker, in MiB, for all it holds")
    cpu_threads: int = Field(default=1, ge=1, description="torch threads of one worker")
    max_groups: int = Field(default=8, ge=2, description="process groups that a worker keeps; one plan may use two")
    cpus_per_worker: float = Field(default=0.1, gt=0, description="Ray's logical CPUs of one worker")

    @model_validator(mode="after")
    def _device_is_named(self) -> ClusterArgs:
        if self.device == "cuda" and self.device_name == "cpu":
            raise config_error("device_name", "name the GPU as the profile tables do, such as `NVIDIA L20`")
        return self

    @property
    def num_workers(self) -> int:
        return self.nodes * self.workers_per_node


class HandoffArgs(Args):
    """How tensors go from the worker of one stage to that of the next."""

    capacity_mb: int = Field(
        default=64, ge=1, description="of the receiver-side buffer of each worker; more goes to the host"
    )
    transport: Literal["nixl", "host"] = Field(
        default="nixl", description="straight into the buffer (host memory where that cannot be), or always host memory"
    )


class AppArgs(Args):
    """All of `args:`. `cluster.nodes` times `cluster.workers_per_node` workers serve all models together."""

    models: list[ModelArgs] = Field(min_length=1, description="the first is the default of requests")
    cluster: ClusterArgs = Field(description="the workers")
    placement: Literal["auto"] | list[WorkerPlacement] = Field(
        default="auto", description="which stages each worker holds, one entry per worker; auto: from `expected_load`"
    )
    expected_load: list[LoadArgs] = Field(
        default=[], description="the requests to plan for; `placement: auto` and most policies need one of each model"
    )
    profiles: list[TableSource] = Field(
        default=["tiny-cpu"], min_length=1, description="built-in tables, or paths of CSV files"
    )
    dispatch: DispatchArgs = Field(default=DispatchArgs(), description="how requests are assigned")
    replan: ReplanArgs = Field(default=ReplanArgs(), description="when the placement follows the load")
    handoff: HandoffArgs = Field(default=HandoffArgs(), description="how tensors go from worker to worker")
    replicas: ReplicasArgs = Field(default=ReplicasArgs(), description="how weights get into the workers")
    checkpoints: CheckpointsArgs = Field(default=CheckpointsArgs(), description="what a lost worker costs")
    videos: VideosArgs = Field(default=VideosArgs(), description="video jobs and their files")
    max_queued_requests: int = Field(default=256, ge=1, description="unfinished requests; the next one gets 429")
    max_retries: int = Field(default=2, ge=0, description="of a request whose worker failed")
    max_result_age_s: float = Field(
        default=60, ge=0, description="how long the same request_id gets a finished result again"
    )
    cache_dir: LocalPath = Field(
        default_factory=lambda: cache.cache_dir().absolute(), description="where tiny models are made and kept"
    )
    drain_timeout_s: float = Field(
        default=300, ge=0, description="of a model that is removed live: then what it still runs is ended"
    )
    decision_log: LocalPath | None = Field(default=None, description="JSON lines of all events and effects")

    @field_validator("models")
    @classmethod
    def _names_are_unique(cls, models: list[ModelArgs]) -> list[ModelArgs]:
        names = [model.name for model in models]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise config_error(f"[{index}].name", f"{name!r} is used twice")
        return models

    @field_validator("placement", mode="plain")
    @classmethod
    def _placement_by_model(cls, value: Any, info: ValidationInfo) -> Literal["auto"] | list[WorkerPlacement]:
        """The short form of one model (`EDC`) becomes the long form (`{model: EDC}`)."""
        if value == "auto":
            return "auto"
        if not isinstance(value, list):
            raise config_error("", "give `auto`, or a list with one entry per worker")
        if "models" not in info.data:
            return "auto"  # the models are wrong already: nothing can be said of the placement
        names = [model.name for model in info.data["models"]]
        return [_worker_placement(entry, f"[{index}]", names) for index, entry in enumerate(value)]

    @model_validator(mode="after")
    def _keys_agree(self) -> AppArgs:
        names = [model.name for model in self.models]
        unexpected = [name for name in names if name not in [load.model for load in self.expected_load]]
        if unexpected and (why := self._needs_load()):
            raise config_error(
                "expected_load", f"`{why}` needs a size to expect of {', '.join(unexpected)}, at least one"
            )
        for index, load in enumerate(self.expected_load):
            if load.model not in names:
                raise config_error(f"expected_load[{index}].model", f"unknown model; there are {', '.join(names)}")
        degree = self.dispatch.max_degree
        if degree is not None and degree > self.cluster.workers_per_node:
            raise config_error(
                "dispatch.max_degree",
                f"{degree} is more than cluster.workers_per_node ({self.cluster.workers_per_node}): "
                "an instance never spans two nodes",
            )
        if self.handoff.capacity_mb >= self.cluster.memory_mb:
            raise config_error("handoff.capacity_mb", f"not below cluster.memory_mb ({self.cluster.memory_mb})")
        if self.replicas.fetch == "mapped" and self.cluster.device != "cpu":
            raise config_error("replicas.fetch", "a GPU cannot use the pages of the host copy; choose `peer` or `host`")
        return self

    def _needs_load(self) -> str | None:
        """The setting that cannot do without `expected_load`, if any."""
        if self.placement == "auto":
            return "placement: auto"
        if find_policy(self.dispatch.policy).needs_load:
            return f"dispatch.policy: {self.dispatch.policy}"
        return "replan.enabled: true" if self.replan.enabled else None


def _worker_placement(entry: Any, key: str, names: list[str]) -> WorkerPlacement:
    if isinstance(entry, str | PlacementType):
        if len(names) != 1:
            raise config_error(key, "with several models, map each model to its type: {model: EDC}")
        entry = {names[0]: entry}
    if not isinstance(entry, dict):
        raise config_error(key, "give a placement type such as EDC, or a mapping of models to types")
    for name, kind in entry.items():
        if name not in names:
            raise config_error(key, f"unknown model; there are {', '.join(names)}")
        if kind not in list(PlacementType):
            raise config_error(key, f"unknown placement type; there are {', '.join(PlacementType)}")
    return {name: PlacementType(kind) for name, kind in entry.items()}
