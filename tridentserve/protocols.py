"""What the core needs of its sibling rooms, as protocols: planners and stage times are handed in, never imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tridentserve.plans import Replica, WorkerId
from tridentserve.requests import RequestSpec, Shape
from tridentserve.stages import PlacementType, Stage


class StageTimes(Protocol):
    """Expected times and memory of the stages. Unknown models and sizes raise `ProfileError`."""

    def seconds(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> float:
        """Seconds per denoising step for DIFFUSE, per call for ENCODE and DECODE."""

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        """Peak activation bytes on one worker, weights not counted."""

    def weights_bytes(self, model: str, stage: Stage) -> int:
        """Bytes of the weights of one stage."""

    def degrees(self, model: str, stage: Stage) -> tuple[int, ...]:
        """The degrees that were profiled, ascending."""

    def optimal_degree(self, model: str, stage: Stage, shape: Shape) -> int:
        """The highest degree whose efficiency T(1) / (k T(k)) is above 0.8."""

    def observe(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int, seconds: float) -> None:
        """Learn from one finished stage (seconds per step for DIFFUSE)."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that waits for a dispatch. `steps_done` is above 0 when its D was stopped before."""

    spec: RequestSpec
    arrival_s: float
    deadline_s: float
    steps_done: int = 0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the dispatcher sees it. `idle`: nothing runs, waits or is reserved there.
    `free_at_s`: when all it has been given is expected to end (now or earlier when idle)."""

    worker_id: WorkerId
    node_id: str
    memory_bytes: int
    replicas: frozenset[Replica]
    idle: bool
    free_at_s: float


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where the three stages of one request go. `diffuse` is in rank order; `encode` and `decode` equal or start with
    its leader where the primary holds those stages, and are auxiliaries elsewhere."""

    request_id: str
    primary: PlacementType
    encode: tuple[WorkerId, ...]
    diffuse: tuple[WorkerId, ...]
    decode: tuple[WorkerId, ...]
    expected_finish_s: float
    reason: str


class Dispatcher(Protocol):
    """Chooses, each tick, which pending requests run now, where and at which degree. Pure: time is an argument."""

    def dispatch(
        self, pending: Sequence[PendingRequest], workers: Sequence[WorkerView], now_s: float
    ) -> list[Assignment]:
        """Assignments for some of `pending`; the others wait. Only idle primaries are used, each at most once."""

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        """None when the placement could serve the request on an idle cluster, else a sentence that says why not."""
