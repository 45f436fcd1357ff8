"""What a policy is: a dispatcher, and the placement that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dispatch.options import DispatchOptions
from tridentserve.cluster import WorkerSpec
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import Dispatcher, StageTimes
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.decode_queue import DecodeOrder


class LoadLike(Protocol):
    """Requests of one kind that are expected. `weight` is how many there are, per second or relative to others."""

    @property
    def model(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def num_inference_steps(self) -> int: ...
    @property
    def weight(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """`placement`: where the stages go at the start; None: ask the Orchestrator. `replanner_wanted`: whether the
    placement follows the load afterwards. `decode_order`: which C goes first where several wait for an auxiliary.
    `one_pool`: the Orchestrator gives each model one virtual replica; False: each request its own first one.
    `decodes_in_tiles`: whether simulated workers that are short of memory do so (live ones always do). Pipelines as
    they come run out of it instead."""

    name: str
    dispatcher: Dispatcher
    placement: PlacementPlan | None
    replanner_wanted: bool
    decode_order: DecodeOrder = "urgent"
    one_pool: bool = True
    decodes_in_tiles: bool = True


PolicyFactory = Callable[[StageTimes, Sequence[WorkerSpec], Sequence[LoadLike], DispatchOptions], Policy]


def spec_of(load: LoadLike) -> RequestSpec:
    """One request of this kind, to ask stage times for."""
    return RequestSpec("expected", load.model, load.shape, load.num_inference_steps)
