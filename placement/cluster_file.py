"""Clusters as YAML files: groups of equal nodes, for plans and simulations of machines that need not exist."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from profiler.tables.links import LinkSpeeds
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError
from tridentserve.validation import describe_problem

_GB = 10**9


class NodeGroup(BaseModel):
    """Nodes that are alike."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    nodes: int = Field(ge=1)
    """The number of nodes."""
    gpus_per_node: int = Field(ge=1)
    """The number of GPUs of each node; each is a worker."""
    gpu: str = Field(min_length=1)
    """The name of the GPU in profile tables."""
    memory_gb: PositiveFloat
    """Memory of each GPU, in units of 10^9 bytes."""


class ClusterSpec(BaseModel):
    """A cluster: one group of nodes or several, all with one kind of GPU. Link speeds are those that one GPU gets, in
    GB/s; None leaves them to the profile table."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    groups: tuple[NodeGroup, ...] = Field(min_length=1)
    intra_node_gb_s: PositiveFloat | None = None
    inter_node_gb_s: PositiveFloat | None = None
    host_gb_s: PositiveFloat | None = None

    @model_validator(mode="after")
    def _one_kind_of_gpu(self) -> ClusterSpec:
        kinds = sorted({group.gpu for group in self.groups})
        if len(kinds) > 1:
            raise ValueError(f"nodes have several kinds of GPU ({', '.join(kinds)}); plan for each kind on its own")
        return self

    @property
    def gpu(self) -> str:
        """The GPU of all nodes, as profile tables name it."""
        return self.groups[0].gpu

    def list_workers(self) -> list[WorkerSpec]:
        """One worker per GPU: `n<node>w<index in node>` in node `n<node>`."""
        sizes = [group for group in self.groups for _ in range(group.nodes)]
        return [
            WorkerSpec(f"n{node}w{index}", f"n{node}", int(group.memory_gb * _GB), group.gpu, index)
            for node, group in enumerate(sizes)
            for index in range(group.gpus_per_node)
        ]

    def override_links(self, profiled: LinkSpeeds) -> LinkSpeeds:
        """The speeds of the profile table, with those that the file states instead."""
        stated = {
            "intra_node_bytes_per_s": self.intra_node_gb_s,
            "inter_node_bytes_per_s": self.inter_node_gb_s,
            "host_bytes_per_s": self.host_gb_s,
        }
        return replace(profiled, **{name: speed * _GB for name, speed in stated.items() if speed is not None})


def read_cluster(path: Path | str) -> ClusterSpec:
    """A cluster from a YAML file: the keys of one `NodeGroup` and the link speeds, or a list of groups, or such a
    list under `groups` and the link speeds. Raises `ConfigError` with the file and the key at fault."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    if isinstance(content, list):
        content = {"groups": content}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be a mapping with the keys {', '.join(NodeGroup.model_fields)}, or a list")
    single = "groups" not in content
    if single:
        links = {key: value for key, value in content.items() if key in ClusterSpec.model_fields}
        content = {"groups": [{key: value for key, value in content.items() if key not in links}], **links}
    try:
        return ClusterSpec.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = first["loc"][2:] if single and first["loc"][:1] == ("groups",) else first["loc"]
        key = ".".join(map(str, place)) or "the cluster"
        raise ConfigError(f"{path}: {key}: {describe_problem(first)}") from None
