"""A simulation put together: cluster, policy, profile and options as the live service has them, and the engine that
needs no GPU. No Ray, no torch. The planners come from `deployments.assembly.planning`, as the live service's do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from deployments.assembly.options import ServiceOptions, choose_device, describe_options, make_service_options
from deployments.assembly.planning import Planners, assemble, assemble_service, list_service_workers, share_stages
from deployments.config.app import AppArgs
from placement import LoadShare
from placement.cluster_file import ClusterSpec
from profiler import CostModel, load_tables
from profiler.loading import TableSource
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.options import WorkerOptions
from tridentserve.engine.simulated import SimulatedEngine, SimulationOptions, SimulationResult, TimedRequest
from tridentserve.errors import ConfigError
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.estimation.expected_times import DEFAULT_SLO_SCALE
from tridentserve.scheduling.estimation.request_work import estimate_work
from tridentserve.stages import Stage

# The placement at the start knows this much of a trace: no service knows what comes later.
KNOWN_S = 60.0


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """The parts of a simulation, in addition to the trace."""

    workers: Sequence[WorkerSpec]
    make_times: Callable[[], CostModel]
    """Gives a new cost model each time: one is the truth, another one learns."""
    options: ServiceOptions = field(default_factory=ServiceOptions)
    """Options of the simulated service; its tick, handoff buffers and process groups hold for the engine too."""
    load: Sequence[LoadShare] | None = None
    """The load that the service expects; None: that of `list_first_mix`."""
    placement: PlacementPlan | None = None
    """The placement at the start; None: planned for the load."""
    engine: SimulationOptions = field(default_factory=SimulationOptions)
    """Costs of serving in the simulation."""


def make_cluster_options(cluster: ClusterSpec, policy: str) -> ServiceOptions:
    """The shipped options for the workers of a cluster."""
    return ServiceOptions(policy=policy, worker=WorkerOptions(torch_device=choose_device(cluster.gpu)))


def load_times(cluster: ClusterSpec, profiles: Sequence[TableSource]) -> Callable[[], CostModel]:
    """Makes cost models of the cluster's GPUs from these tables (named as for `profiler.load_tables`), with the link
    speeds that the cluster states, else those of the tables. Raises `ProfileError`."""
    tables = load_tables(profiles)
    links = cluster.override_links(CostModel(tables, cluster.gpu).links)
    return partial(CostModel, tables, cluster.gpu, links)


@dataclass(frozen=True, slots=True)
class AssembledSimulation:
    """An engine that is ready to serve a trace, and the options that it has."""

    engine: SimulatedEngine
    options: ServiceOptions
    """Those of the setup, with the order of decodes that the policy sets."""
    simulation: SimulationOptions
    """Those of the setup, with what the policy and the service's options set."""

    def describe(self) -> dict[str, Any]:
        """See `describe_options`."""
        return describe_options(self.options, self.simulation)


def simulate(arrivals: Sequence[TimedRequest], setup: SimulationSetup) -> SimulationResult:
    """Serve a trace. Raises what `assemble_simulation` raises."""
    return assemble_simulation(arrivals, setup).engine.run(arrivals)


def assemble_simulation(arrivals: Sequence[TimedRequest], setup: SimulationSetup) -> AssembledSimulation:
    """Make all that serves a trace. Raises `ConfigError` for a trace without requests or an unknown policy,
    `PlacementError` when the cluster cannot hold the models, `ProfileError` for a model or size that was not
    profiled."""
    options, workers = setup.options, list(setup.workers)
    planners, truth = assemble_planners(setup, workers, find_load(arrivals, setup))
    engine = make_engine_options(options, replace(setup.engine, decodes_in_tiles=planners.policy.decodes_in_tiles))
    scheduler = replace(options.scheduler, decode_order=planners.policy.decode_order)
    return AssembledSimulation(
        SimulatedEngine(planners.scheduler, workers, planners.placement, truth, engine),
        replace(options, scheduler=scheduler),
        engine,
    )


def find_load(arrivals: Sequence[TimedRequest], setup: SimulationSetup) -> list[LoadShare]:
    """The load that the service expects. Raises `ConfigError` for a trace without requests."""
    if not arrivals:
        raise ConfigError("the trace holds no requests: there is nothing to simulate")
    return list(setup.load) if setup.load is not None else list_first_mix(arrivals)


def assemble_planners(
    setup: SimulationSetup, workers: Sequence[WorkerSpec], load: Sequence[LoadShare]
) -> tuple[Planners, CostModel]:
    """The planners of some of the workers, and the times that stages take there. Raises what `assemble` raises."""
    times, truth = setup.make_times(), setup.make_times()
    if shares := share_stages(setup.options, times, workers, load):
        times, truth = times.share(shares, {}), truth.share(shares, {})
    return assemble(setup.options, times, workers, load, setup.placement), truth


def simulate_service(
    args: AppArgs, times: StageTimes, truth: StageTimes, arrivals: Sequence[TimedRequest], engine: SimulationOptions
) -> SimulationResult:
    """Serve a trace with the workers, placement and scheduler of a configuration. `times` is what the scheduler goes by
    and corrects, `truth` how long stages take. Raises what `deployments.assembly.planning` raises."""
    specs = list_service_workers(args)
    planners = assemble_service(args, times, specs)
    options = make_engine_options(make_service_options(args), engine)
    return SimulatedEngine(planners.scheduler, specs, planners.placement, truth, options).run(arrivals)


def make_engine_options(options: ServiceOptions, engine: SimulationOptions) -> SimulationOptions:
    """The options of an engine whose tick, handoff buffers and process groups are those of the service."""
    return replace(
        engine,
        tick_s=options.engine.tick_s,
        handoff_capacity_bytes=options.worker.handoff_bytes,
        group_bytes=options.worker.group_bytes,
    )


def list_mix(arrivals: Sequence[TimedRequest]) -> list[LoadShare]:
    """The requests of a trace by kind, per second."""
    duration_s = max(arrival_s for arrival_s, _ in arrivals) or 1.0
    kinds = Counter((spec.model, spec.shape, spec.num_inference_steps) for _, spec in arrivals)
    return [LoadShare(*kind, weight=count / duration_s) for kind, count in sorted(kinds.items())]


def list_first_mix(arrivals: Sequence[TimedRequest], known_s: float = KNOWN_S) -> list[LoadShare]:
    """The mix of a trace that is known when its service starts, whatever its policy: that of the first seconds, and the
    other kinds with weight 0, as a service is told the sizes that it must be able to serve."""
    start_s = min(arrival_s for arrival_s, _ in arrivals)
    first = list_mix([(arrival_s, spec) for arrival_s, spec in arrivals if arrival_s <= start_s + known_s])
    seen = {replace(share, weight=0.0) for share in first}
    unseen = [replace(share, weight=0.0) for share in list_mix(arrivals)]
    return first + [share for share in unseen if share not in seen]


def set_deadlines(
    arrivals: Sequence[TimedRequest], times: StageTimes, slo_scale: float | None = None
) -> list[TimedRequest]:
    """The trace with an SLO on every request: its own, else `slo_scale` times its latency at the optimal degrees
    (section 8.1; without one `DEFAULT_SLO_SCALE`), by the profile as it stands: so all policies meet the same
    deadlines, whatever they learn. The profile also tells which models are served whole: E and C of no other are
    without weights."""
    scale = DEFAULT_SLO_SCALE if slo_scale is None else slo_scale
    whole = {name: _is_whole(times, name) for name in {spec.model for _, spec in arrivals}}
    return [(arrival_s, replace(_set_slo(spec, times, scale), whole=whole[spec.model])) for arrival_s, spec in arrivals]


def _is_whole(times: StageTimes, model: str) -> bool:
    return not any(times.weights_bytes(model, stage) for stage in (Stage.ENCODE, Stage.DECODE))


def _set_slo(spec: RequestSpec, times: StageTimes, scale: float) -> RequestSpec:
    if spec.slo_s is not None:
        return spec
    return replace(spec, slo_s=scale * estimate_work(times, spec).seconds)
