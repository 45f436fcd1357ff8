"""The messages between the live engine and its workers: plain data, without torch and ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.live.channels.channel import ChannelAddress
from tridentserve.engine.live.channels.compact_pickles import pickle_by_fields
from tridentserve.engine.options import WorkerOptions
from tridentserve.models.kernels import Kernels
from tridentserve.models.number_formats import NumberFormats
from tridentserve.models.step_cache import StepCache
from tridentserve.plans import DispatchPlan, PlanMember, Replica, StageSpan, WorkerId
from tridentserve.protocols import LoadSource
from tridentserve.requests import GenerationInputs, RequestSpec, Shape
from tridentserve.scheduling.events import ReplicaLoaded
from tridentserve.weights_share import WeightsShare


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of a model's weights: its folder, and the number formats, the kernels and the step cache with which it
    computes."""

    name: str
    folder: Path
    """Model folder."""
    formats: NumberFormats = field(default_factory=NumberFormats)
    kernels: Kernels = field(default_factory=Kernels)
    step_cache: StepCache = field(default_factory=StepCache)
    image_start: bool = False
    """True where requests may start from an image that the family can do without, for which E has the VAE too."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """All a worker needs to start."""

    spec: WorkerSpec
    incarnation: int
    label: str
    """Names its placement in the Ray dashboard."""
    replicas: frozenset[Replica]
    sources: dict[str, ModelSource]
    shares: dict[Replica, WeightsShare]
    """The stages of which workers do not keep all weights."""
    store_host: str
    store_port: int
    options: WorkerOptions = field(default_factory=WorkerOptions)
    hot_width: int = 1
    """The most members of the process groups that are made before a plan asks for them (`list_hot_groups`)."""


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Describes to a peer how to write into the slab of a worker."""

    name: str
    """Name of the worker's NIXL agent, another one in each incarnation."""
    metadata: bytes
    """Description of the agent, as NIXL makes and reads it."""
    base: int
    """Address of the slab."""
    device_id: int
    """Index of the slab's GPU; 0 for host memory."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker can take plans."""

    address: LinkAddress | None
    """Describes to peers how to write into its slab; None without NIXL."""
    channel: ChannelAddress
    """The engine and peers call it there (see `WorkerCalls`)."""
    node_id: str
    """Ray's id of its node."""
    max_denoising: int | None
    """See `WorkerSpec.max_denoising`."""


@dataclass(frozen=True, slots=True)
class ExpectedPeak:
    """Memory that the activations of a plan are expected to take on one worker; 0 where it is not known."""

    num_bytes: int = 0
    frugal_bytes: int = 0
    """The same with E one request after another and C in tiles. A worker that lacks the memory for `num_bytes` runs
    the plan so."""

    def with_bytes(self, num_bytes: int) -> ExpectedPeak:
        """The same with `num_bytes` more in addition to the activations."""
        return ExpectedPeak(self.num_bytes + num_bytes, self.frugal_bytes + num_bytes)


UNKNOWN_PEAK = ExpectedPeak()


@dataclass(frozen=True, slots=True)
class ProgressNote:
    """The denoising steps that the leader of a plan has done since its note before. The step after which the plan ends
    has none (`plan_calls.list_last_steps`)."""

    steps: tuple[tuple[str, int], ...]
    """Request by request and step by step, in the order in which they were done: the id of the request, and the number
    of its steps that were done then."""


@dataclass(frozen=True, slots=True)
class PreviewNote:
    """A preview of a request of a plan."""

    request_id: str
    step: int
    """Denoising steps of the request that were done."""
    files: tuple[bytes, ...]
    """A small picture of each output."""


@dataclass(frozen=True, slots=True)
class CheckpointNote:
    """A state checkpoint of each member of a plan has arrived at the worker that keeps them."""

    num_steps: int
    """Denoising steps of the plan that were done."""
    spans: tuple[StageSpan, ...]
    """Stages of the plan that had run by then."""


@dataclass(frozen=True, slots=True)
class ComputedNote:
    """A plan has done all its stages. Its report comes when its outputs have been made into files."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A worker has made a replica resident for a plan."""

    loaded: Replica
    evicted: tuple[Replica, ...]
    """Replicas that have left its memory since its previous `ReplicaLoad`."""
    source: LoadSource
    num_bytes: int
    seconds: float

    def make_event(self, worker_id: WorkerId) -> ReplicaLoaded:
        """The event that tells the scheduler of it."""
        return ReplicaLoaded(worker_id, self.loaded, self.evicted, self.source, self.num_bytes, self.seconds)


# The notes that a worker sends while a plan is under way.
PlanNote = ProgressNote | PreviewNote | CheckpointNote | ComputedNote | ReplicaLoad


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The report of one worker at the end of a plan."""

    plan_id: int
    outcome: Literal["finished", "stopped", "failed"]
    spans: list[StageSpan] = field(default_factory=list)
    num_outputs: dict[str, int] = field(default_factory=dict)
    """Images or videos that were made for each request."""
    outputs: dict[str, tuple[bytes, ...]] | None = None
    """The outputs themselves, where they are small; None where the worker keeps them (see `collect_outputs`)."""
    peak_memory_bytes: int = 0
    """Largest memory in use while the plan ran."""
    peak_growth_bytes: int = 0
    """Growth of the memory in use from the start of the plan to that peak; 0 where it cannot be measured."""
    expected_peak_bytes: int = 0
    """The value of `peak_growth_bytes` that the profile expects."""
    tiled: bool = False
    """The requests were decoded in tiles, because memory was short."""
    skipped_steps: dict[str, float] = field(default_factory=dict)
    """For each request that need not be exact and had steps in the plan: the number of all its steps so far that took
    over what others had found."""
    buffer_used_bytes: int = 0
    """Bytes of the worker's handoff buffer that were in use then."""
    buffer_bytes: int = 0
    """Size of that buffer."""
    loras: tuple[str, ...] | None = None
    """The LoRAs that the worker holds now, by `LoraFile.key`; None: as it told before."""
    paused_after: int | None = None
    """The plan was paused after this number of its denoising steps; None when it was not."""
    taken_steps: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The half-open range of denoising steps that a plan which takes over another one did of each member that it
    had. All ranges are as long."""
    error: str = ""
    retry: bool = True
    """See `PlanFailed`."""
    code: str = "worker_failed"
    """Code of the error, a class of `tridentserve.errors`."""
    may_be_worker: bool = False
    """The worker itself may be at fault: neither another one, nor short memory, nor what was asked is known to be."""
    is_device_broken: bool = False
    """The worker's process cannot use its device any more: it is to be ended."""


pickle_by_fields(DispatchPlan, PlanMember, StageSpan, RequestSpec, GenerationInputs, Shape)
pickle_by_fields(ExpectedPeak, ProgressNote, PlanReport)
