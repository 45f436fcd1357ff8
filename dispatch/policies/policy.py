"""Policies: a dispatcher with the placement that it stands for, and how the service finds and builds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from dispatch.options import NO_BATCHES, DispatchOptions
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated.options import SimulationOptions
from tridentserve.errors import ConfigError
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import Dispatcher, StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.runs.auxiliary_queues import DecodeOrder
from tridentserve.scheduling.scheduler import SchedulerOptions


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """All that a policy may be built from."""

    times: StageTimes
    """Expected times and memory of the stages. They are learned while the service runs: keep the object, not values."""
    workers: Sequence[WorkerSpec]
    """The workers of the cluster; at least one."""
    load: Sequence[LoadShare]
    """The requests that are expected, by kind. Empty where a configuration names none."""
    options: DispatchOptions
    """The dispatcher's settings; a policy reads those that concern it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A dispatcher, and what the engines must know of it in addition to its decisions."""

    dispatcher: Dispatcher
    """Decides at each tick which requests run where."""
    placement: PlacementPlan | None = None
    """The placement at the start. None: the Orchestrator plans it for the expected load."""
    replanner_wanted: bool = True
    """True when the placement follows the load afterwards."""
    decode_order: DecodeOrder = SchedulerOptions().decode_order
    """The order of decodes where several wait for an auxiliary."""
    one_pool: bool = True
    """True when the Orchestrator gives each model one virtual replica. False: each request has its own first one."""
    all_together: bool = True
    """True when every worker holds all stages where that serves as much. False: never."""
    shares_by_work: bool = True
    """True when the virtual replicas of a model share its workers by the GPU-seconds of their requests. False: by the
    number."""
    decodes_in_tiles: bool = SimulationOptions().decodes_in_tiles
    """True when simulated workers that are short of memory decode in tiles, as live ones always do. Stock pipelines run
    out of memory instead."""
    name: str = ""
    """The name or the dotted path under which the policy was chosen; `make_policy` fills it in."""


PolicyFactory = Callable[[PolicyContext], Policy]


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The facts about a policy that are known before it is built for a cluster."""

    name: str
    """Its name in configurations and on command lines."""
    make: PolicyFactory
    """Builds it. Each call gives a new one, as policies remember things."""
    needs_load: bool = False
    """True when it cannot be built without an expected load, as it places the stages itself, by that load."""
    supports_units: bool = False
    """True when it plans with units of workers that hold a stage's weights together (`placement.units`). For the others
    a model that needs this does not fit."""
    default_max_batch: int = NO_BATCHES
    """The largest batch in a service whose configuration does not say. Above 1 for policies that live on batches only:
    in a batch, latents of tiny models differ by 2e-6, which is up to 1 of 255 in pixels."""
    one_load: bool = False
    """True when its dispatcher is sized by the load of the start, so that models cannot come and go."""
    runs_whole: bool = False
    """True when D, once begun, always runs to its last step, so that no request waits that was stopped on the way, but
    after a fault."""

    def resolve(self, options: DispatchOptions) -> DispatchOptions:
        """The options with which the policy is made: its own `max_batch` where they set none."""
        if options.max_batch is not None:
            return options
        return replace(options, max_batch=self.default_max_batch)


class PolicyFacts(TypedDict, total=False):
    """The arguments of `register_policy`: fields of `PolicySpec`, which documents them and has their defaults."""

    needs_load: bool
    supports_units: bool
    default_max_batch: int
    one_load: bool
    runs_whole: bool


# Filled by `register_policy`, in the order of the calls.
_SPECS: dict[str, PolicySpec] = {}


def register_policy(name: str, **facts: Unpack[PolicyFacts]) -> Callable[[PolicyFactory], PolicyFactory]:
    """Decorates a function that builds a policy, which can be chosen by this name from then on; the function itself
    stays as it is. `facts` are fields of `PolicySpec`. Raises `ConfigError` when the name is taken."""

    def register(make: PolicyFactory) -> PolicyFactory:
        if name in _SPECS:
            module = _SPECS[name].make.__module__
            raise ConfigError(f"a policy of {module} is named {name!r} already; choose another name")
        _SPECS[name] = PolicySpec(name, make, **facts)
        return make

    return register


def list_policies() -> dict[str, PolicySpec]:
    """The policies that were registered so far, by name."""
    return dict(_SPECS)


def make_example_request(load: LoadShare) -> RequestSpec:
    """One request of this kind, to ask stage times for."""
    return RequestSpec("expected", load.model, load.shape, load.num_inference_steps)
