"""What the live engine and its workers tell each other. Plain data; no torch, no ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tridentserve.cluster import WorkerSpec
from tridentserve.models.cache import cache_dir
from tridentserve.models.kernels import Kernels
from tridentserve.plans import Replica
from tridentserve.protocols import LoadSource
from tridentserve.scheduling.estimation.hot_groups import HotGroup
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. `dtype` is a torch dtype's name, None for the device's default."""

    name: str
    folder: Path
    dtype: str | None = None
    kernels: Kernels = field(default_factory=Kernels)


# How a worker gets replicas. `mapped`: it uses the host copy's pages themselves (only on a CPU). `peer`: into memory of
# its own, from a worker of its node that has them, else from the host copy. `host`: from the host copy. `auto`: mapped
# on a CPU, else peer.
Fetch = Literal["auto", "mapped", "peer", "host"]


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """All a worker needs to start. `label` names its placement in the Ray dashboard. `hot_groups`: made when all
    workers have started, by their first incarnations. `host_dir`: where the node's host copies of weights are;
    `block_bytes`: how much of a replica moves at a time."""

    spec: WorkerSpec
    incarnation: int
    label: str
    replicas: frozenset[Replica]
    sources: dict[str, ModelSource]
    store_host: str
    store_port: int
    torch_device: str = "cpu"
    num_threads: int = 1
    handoff_bytes: int = 64 << 20
    handoff_transport: Literal["nixl", "host"] = "nixl"
    max_groups: int = 8
    group_timeout_s: float = 60.0
    host_dir: Path = field(default_factory=lambda: cache_dir() / "host")
    fetch: Fetch = "auto"
    block_bytes: int = 64 << 20
    hot_groups: tuple[HotGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """What a peer needs to write into this worker's slab. `name` is unique per incarnation of a worker."""

    name: str
    metadata: bytes
    base: int
    device_id: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker can take plans: where peers write to (None without NIXL), and on which node it is."""

    address: LinkAddress | None
    node_id: str


@dataclass(frozen=True, slots=True)
class Span:
    """When a stage ran, in seconds of the Unix clock."""

    stage: Stage
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class ExpectedPeak:
    """What the activations of a plan are expected to take on one worker; 0 where nobody knows. `frugal_bytes`: with E
    one request after another and C in tiles, which is what a worker does that has not the memory for `num_bytes`."""

    num_bytes: int = 0
    frugal_bytes: int = 0

    def plus(self, num_bytes: int) -> ExpectedPeak:
        """With so many more beside the activations."""
        return ExpectedPeak(self.num_bytes + num_bytes, self.frugal_bytes + num_bytes)


UNKNOWN_PEAK = ExpectedPeak()


@dataclass(frozen=True, slots=True)
class StepNote:
    """The leader of a plan has done a denoising step, and goes on."""

    request_id: str
    steps_done: int


@dataclass(frozen=True, slots=True)
class StatesSaved:
    """Copies of the states of a plan, after so many of its steps, have arrived at its keeper; what had run by then."""

    num_steps: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A worker has made a replica resident for a plan. `evicted`: what has left its memory since it last told."""

    loaded: Replica
    evicted: tuple[Replica, ...]
    source: LoadSource
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """How a plan ended on one worker. So many pictures or videos of each request follow, one item each, in this order.
    `retry`: see `PlanFailed`. `tiled`: the requests were decoded in tiles, as memory was short.
    `paused_after`: it was paused after so many of its denoising steps.
    `peak_memory_bytes`: the most that was in use while it ran; `peak_growth_bytes`: so much more than when it began
    (0 where that cannot be measured), to be compared with the profile's `expected_peak_bytes`."""

    plan_id: int
    outcome: Literal["finished", "stopped", "failed"]
    spans: list[Span] = field(default_factory=list)
    num_images: dict[str, int] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    peak_growth_bytes: int = 0
    expected_peak_bytes: int = 0
    tiled: bool = False
    paused_after: int | None = None
    error: str = ""
    retry: bool = True
    code: str = "worker_failed"
