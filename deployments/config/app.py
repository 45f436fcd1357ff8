"""The `args:` of the application in a Serve config file. Unknown keys are errors; messages say which key is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from deployments.config.base import MEBIBYTES, Args, LocalPath, make_absolute, make_config_error, make_option
from deployments.config.host_memory import share_host_bytes
from deployments.config.models import ModelArgs
from deployments.config.names import name_models
from deployments.config.planning import DispatchArgs, LoadArgs, ReplanArgs
from deployments.config.profiling import ProfilingArgs
from deployments.config.replicas import CheckpointsArgs, FaultsArgs, ReplicasArgs
from deployments.config.videos import VideosArgs
from dispatch.options import Positive
from dispatch.policies import find_policy
from tridentserve.byte_sizes import MIB
from tridentserve.engine.options import EngineOptions, TorchDevice, Transport, WorkerOptions
from tridentserve.errors import ConfigError
from tridentserve.models import cache
from tridentserve.scheduling.scheduler import SchedulerOptions
from tridentserve.stages import PlacementType

WorkerPlacement = dict[str, PlacementType]


def _resolve_table_source(name: str) -> str:
    return str(make_absolute(Path(name))) if is_table_path(name) else name


def is_table_path(name: str) -> bool:
    """True when an entry of `profiles` is the path of a CSV file; else it names a table that comes with the package."""
    return name.endswith(".csv")


TableNameOrPath = Annotated[str, AfterValidator(_resolve_table_source)]


class ClusterArgs(Args):
    """The devices. One worker owns one GPU, or `cpu_threads` threads of a CPU."""

    nodes: int = Field(default=1, ge=1, description="Number of nodes of the Ray cluster that hold workers.")
    workers_per_node: int = Field(ge=1, description="Number of workers on each node, one per GPU.")
    device: TorchDevice = make_option(WorkerOptions, "torch_device")
    device_name: str = Field(
        default="cpu",
        description="Name of the device in the profile tables, such as `NVIDIA L20`; it is needed with `cuda`.",
    )
    memory_mb: int | Literal["auto"] = Field(
        default="auto",
        description="Memory of one worker, in MiB, for weights, activations, the handoff buffer and process groups; "
        "`auto` is 95 % of what is free on a GPU at the start, less on small ones where process groups need more, "
        "or on a CPU three quarters of the machine's memory divided among its workers, in both cases the least of all "
        "nodes.",
    )
    cpu_threads: int = make_option(WorkerOptions, "num_threads")
    max_denoising: int | None = make_option(WorkerOptions, "max_denoising")
    max_groups: int = make_option(WorkerOptions, "max_groups")
    cpus_per_worker: float = make_option(WorkerOptions, "num_cpus")
    resources: dict[str, Positive] = Field(
        default={},
        description="Further resources of Ray that one worker reserves, such as `{'accelerator_type:L20': 0.001}`, "
        "which only nodes with this kind of GPU have.",
    )
    warm_up: Literal["auto", "never", "always"] = Field(
        default="auto",
        description="Says whether workers run two steps of a few sizes of each model before they take requests, which "
        "else wait for what is slow at its first use; `auto` is where the model is compiled, or the device is a GPU.",
    )

    @field_validator("memory_mb", mode="before")
    @classmethod
    def _check_memory(cls, value: Any) -> Any:
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if value != "auto" and not is_number:
            raise make_config_error("", "give a whole number of at least 1, or `auto`")
        return value

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, resources: dict[str, float]) -> dict[str, float]:
        if own := sorted({"CPU", "GPU"} & set(resources)):
            raise make_config_error(own[0], "the other keys of `cluster` say how many of these a worker reserves")
        return resources

    @model_validator(mode="after")
    def _check_device_name(self) -> ClusterArgs:
        if self.has_gpus and self.device_name == "cpu":
            raise make_config_error("device_name", "name the GPU as the profile tables do, such as `NVIDIA L20`")
        return self

    @property
    def has_gpus(self) -> bool:
        """True where each worker has a GPU. Nothing else in the deployments asks which word `device` is."""
        return self.device == "cuda"

    @property
    def num_workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def memory_bytes(self) -> int:
        """Memory of one worker. Of `auto` that of workers on this machine. Raises `ConfigError` where a GPU has to be
        asked."""
        if self.memory_mb != "auto":
            return self.memory_mb * MIB
        if self.has_gpus:
            raise ConfigError("cluster.memory_mb: `auto` is known only where the service runs; give a number here")
        return share_host_bytes(self.workers_per_node)


class SchedulerArgs(Args):
    """Options of the schedulers."""

    cells: int = Field(
        default=1,
        ge=1,
        description="Number of schedulers, each with a part of the nodes (a cell) and the requests that are sent "
        "there. One is enough for hundreds of workers.",
    )
    predict_every_s: float | None = make_option(SchedulerOptions, "predict_every_s")
    explain_last: int = make_option(EngineOptions, "explain_last")
    orphan_s: float = Field(
        default=30.0,
        ge=0,
        description="Time for which requests go on, in seconds, whose replica of Api is lost. A client that asks again "
        "with the same id meanwhile joins its request.",
    )


class HandoffArgs(Args):
    """Options of handoffs, which take tensors from the worker of one stage to that of the next."""

    capacity_mb: int = make_option(
        WorkerOptions,
        "handoff_bytes",
        MEBIBYTES,
        "Size of the handoff buffer of one worker, in MiB; what does not fit goes through host memory.",
    )
    transport: Transport = make_option(WorkerOptions, "handoff_transport")


class AppArgs(Args):
    """All of `args:`. `cluster.nodes` times `cluster.workers_per_node` workers serve all models together."""

    models: list[ModelArgs] = Field(
        min_length=1, description="Models that are served, see below; the first is the default of requests."
    )
    cluster: ClusterArgs = Field(description="Workers that serve them, see below.")
    placement: Literal["auto"] | list[WorkerPlacement] = Field(
        default="auto",
        description="Stages that each worker holds, one entry per worker; `auto` is the policy's own placement, or "
        "else the one that is planned for `expected_load`.",
    )
    expected_load: list[LoadArgs] = Field(
        default=[],
        description="Requests to plan for. Of a model without an entry, `placement: auto` and policies that plan for a "
        "load expect requests that name neither a size nor steps, smaller where that size was not profiled.",
    )
    profiles: list[TableNameOrPath] = Field(
        default=["tiny-cpu"],
        min_length=1,
        description="Tables of stage times: names of those that come with the package, or paths of CSV files.",
    )
    profiling: ProfilingArgs = Field(
        default=ProfilingArgs(),
        description="Says what happens at the start for a model without rows for its device in `profiles`.",
    )
    scheduler: SchedulerArgs = Field(
        default=SchedulerArgs(), description="Says into how many cells, with a scheduler each, the cluster is divided."
    )
    dispatch: DispatchArgs = Field(default=DispatchArgs(), description="Says how requests are assigned to workers.")
    replan: ReplanArgs = Field(default=ReplanArgs(), description="Says when the placement follows the load.")
    handoff: HandoffArgs = Field(default=HandoffArgs(), description="Says how tensors go from worker to worker.")
    replicas: ReplicasArgs = Field(default=ReplicasArgs(), description="Says how weights get into the workers.")
    checkpoints: CheckpointsArgs = Field(
        default=CheckpointsArgs(), description="Says how often the states of requests are saved on other workers."
    )
    faults: FaultsArgs = Field(default=FaultsArgs(), description="Says when a worker on which plans fail is set aside.")
    videos: VideosArgs = Field(
        default=VideosArgs(), description="Says where video jobs and their files are kept, and for how long."
    )
    validation: Literal["lenient", "strict"] = Field(
        default="lenient",
        description="Says what becomes of fields that other servers have and that have no effect here: `lenient` takes "
        "them, and the answer names them in `ignored`; `strict` refuses them like any field that is unknown.",
    )
    max_queued_requests: int = make_option(EngineOptions, "max_requests")
    max_retries: int = make_option(SchedulerOptions, "max_retries")
    max_result_age_s: float = make_option(EngineOptions, "max_result_age_s")
    cache_dir: LocalPath = Field(
        default_factory=lambda: cache.cache_dir().absolute(),
        description="Directory in which tiny models are made and kept.",
    )
    drain_timeout_s: float = Field(
        default=300,
        ge=0,
        description="Time that a model that is removed while the service runs has to finish its requests, in seconds; "
        "then these are ended.",
    )
    loras_file: LocalPath | None = Field(
        default=None,
        description="File on the node of the Scheduler that keeps which LoRAs were added and removed over HTTP; "
        "without it they are as at the start again when the Scheduler has been restarted.",
    )
    decision_log: LocalPath | None = make_option(EngineOptions, "decision_log")

    @field_validator("models", mode="before")
    @classmethod
    def _name_models(cls, models: Any) -> Any:
        return name_models(models)

    @field_validator("models")
    @classmethod
    def _check_names(cls, models: list[ModelArgs]) -> list[ModelArgs]:
        names = [model.name for model in models]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise make_config_error(f"[{index}].name", f"{name!r} is used twice")
        return models

    @field_validator("placement", mode="plain")
    @classmethod
    def _expand_placement(cls, value: Any, info: ValidationInfo) -> Literal["auto"] | list[WorkerPlacement]:
        """The short form of one model (`EDC`) becomes the long form (`{model: EDC}`)."""
        if value == "auto":
            return "auto"
        if not isinstance(value, list):
            raise make_config_error("", "give `auto`, or a list with one entry per worker")
        if "models" not in info.data:
            return "auto"  # the models are wrong already: nothing can be said of the placement
        names = [model.name for model in info.data["models"]]
        return [_read_worker_placement(entry, f"[{index}]", names) for index, entry in enumerate(value)]

    @model_validator(mode="after")
    def _check_keys(self) -> AppArgs:
        names = [model.name for model in self.models]
        for index, load in enumerate(self.expected_load):
            if load.model not in names:
                raise make_config_error(f"expected_load[{index}].model", f"unknown model; there are {', '.join(names)}")
        for key in ("request_weights", "fair_shares", "pack_sizes", "ring_sizes"):
            if unknown := sorted(set(getattr(self.dispatch, key) or ()) - set(names)):
                raise make_config_error(f"dispatch.{key}.{unknown[0]}", f"unknown model; there are {', '.join(names)}")
        self._check_cells()
        degree = self.dispatch.max_degree
        if degree is not None and degree > self.cluster.workers_per_node:
            raise make_config_error(
                "dispatch.max_degree",
                f"{degree} is more than cluster.workers_per_node ({self.cluster.workers_per_node}): "
                "a group of workers never spans two nodes",
            )
        memory_mb = self.cluster.memory_mb
        if memory_mb != "auto" and self.handoff.capacity_mb >= memory_mb:
            raise make_config_error("handoff.capacity_mb", f"not below cluster.memory_mb ({memory_mb})")
        if self.replicas.fetch == "mapped" and self.cluster.has_gpus:
            raise make_config_error(
                "replicas.fetch", "a GPU cannot use the pages of the host copy; choose `peer` or `host`"
            )
        return self

    def _check_cells(self) -> None:
        num_cells = self.scheduler.cells
        if num_cells > self.cluster.nodes:
            raise make_config_error(
                "scheduler.cells",
                f"{num_cells} is more than cluster.nodes ({self.cluster.nodes}): a cell has whole nodes",
            )
        if num_cells > 1 and self.cluster.memory_mb == "auto":
            raise make_config_error("cluster.memory_mb", "give a number: with several cells, no one asks all nodes")
        for index, model in enumerate(self.models):
            if unknown := [cell for cell in model.cells or () if cell >= num_cells]:
                raise make_config_error(
                    f"models[{index}].cells",
                    f"there is no cell {unknown[0]}; they are numbered from 0 to {num_cells - 1}",
                )
        if self.models[0].cells is not None and len(set(self.models[0].cells)) < num_cells:
            raise make_config_error(
                "models[0].cells", "the first model is the default of requests, so that all cells serve it"
            )
        if num_cells > 1 and self.placement != "auto" and len(self.placement) != self.cluster.num_workers:
            raise make_config_error(
                "placement",
                f"lists {len(self.placement)} workers and there are {self.cluster.num_workers}; list each once",
            )

    @property
    def needs_load(self) -> bool:
        """True when a size has to be expected of each model."""
        return self.placement == "auto" or find_policy(self.dispatch.policy).needs_load or self.replan.enabled is True


def _read_worker_placement(entry: Any, key: str, names: list[str]) -> WorkerPlacement:
    if isinstance(entry, str | PlacementType):
        if len(names) != 1:
            raise make_config_error(key, "with several models, map each model to its type: {model: EDC}")
        entry = {names[0]: entry}
    if not isinstance(entry, dict):
        raise make_config_error(key, "give a placement type such as EDC, or a mapping of models to types")
    for name, kind in entry.items():
        if name not in names:
            raise make_config_error(key, f"unknown model; there are {', '.join(names)}")
        if kind not in list(PlacementType):
            raise make_config_error(key, f"unknown placement type; there are {', '.join(PlacementType)}")
    return {name: PlacementType(kind) for name, kind in entry.items()}
