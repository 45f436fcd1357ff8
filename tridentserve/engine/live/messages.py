"""What the live engine and its workers tell each other. Plain data; no torch, no ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.options import WorkerOptions
from tridentserve.models.kernels import Kernels
from tridentserve.plans import Replica, StageSpan
from tridentserve.protocols import LoadSource
from tridentserve.scheduling.estimation.hot_groups import HotGroup


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from. `dtype` is a torch dtype's name, None for the device's default."""

    name: str
    folder: Path
    dtype: str | None = None
    kernels: Kernels = field(default_factory=Kernels)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """All a worker needs to start."""

    spec: WorkerSpec
    incarnation: int
    label: str
    """Names its placement in the Ray dashboard."""
    replicas: frozenset[Replica]
    sources: dict[str, ModelSource]
    store_host: str
    store_port: int
    options: WorkerOptions = field(default_factory=WorkerOptions)
    hot_groups: tuple[HotGroup, ...] = ()
    """Process groups that are made when all workers have started, by their first incarnations."""


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
    spans: tuple[StageSpan, ...]


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
    spans: list[StageSpan] = field(default_factory=list)
    num_images: dict[str, int] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    peak_growth_bytes: int = 0
    expected_peak_bytes: int = 0
    tiled: bool = False
    paused_after: int | None = None
    error: str = ""
    retry: bool = True
    code: str = "worker_failed"
