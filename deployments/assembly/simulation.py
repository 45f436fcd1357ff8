"""A simulation put together: cluster, policy, profile as the live service has them, and the engine that needs no GPU.

No Ray, no torch. What is made here is what `deployments.assembly.planning` makes for the live service: the same
Scheduler, Dispatcher, Orchestrator and Replanner objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from deployments.assembly.planning import (
    degrees_in_use,
    group_bytes,
    make_scheduler,
    plan_placement,
    policy_of,
    start_placement,
    worker_specs,
)
from deployments.config.app import AppArgs
from dispatch import DispatchOptions
from dispatch.policies import find_policy, make_policy
from placement import LoadShare, MonitoredReplanner, Orchestrator, ReplanOptions
from placement.cluster_file import ClusterSpec
from placement.units import units_for
from profiler import CostModel, load_tables
from profiler.loading import TableSource
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated import Arrival, SimulatedEngine, SimulationOptions, SimulationResult
from tridentserve.errors import ConfigError
from tridentserve.protocols import StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.estimation.expected_times import DEFAULT_SLO_SCALE
from tridentserve.scheduling.estimation.plan_estimates import stage_seconds
from tridentserve.scheduling.scheduler import Scheduler, SchedulerOptions
from tridentserve.stages import Stage

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """Who serves. `make_times` gives a new cost model each time: one is the truth, another one learns.
    `load` is what placements are made for at the start; None: the mix of the whole trace."""

    workers: Sequence[WorkerSpec]
    make_times: Callable[[], CostModel]
    policy: str = "default"
    load: Sequence[LoadShare] | None = None
    dispatch: DispatchOptions = field(
        default_factory=lambda: DispatchOptions(handoff_reserve_bytes=GIB, max_batch=8, time_limit_s=5.0)
    )
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    replan: ReplanOptions = field(default_factory=ReplanOptions)
    engine: SimulationOptions = field(default_factory=lambda: SimulationOptions(handoff_capacity_bytes=GIB))


def times_of(cluster: ClusterSpec, profiles: Sequence[TableSource]) -> Callable[[], CostModel]:
    """Makes cost models of the cluster's GPUs from these tables (named as for `profiler.load_tables`), with the link
    speeds that the cluster states, else those of the tables. Raises `ProfileError`."""
    tables = load_tables(profiles)
    links = cluster.links(CostModel(tables, cluster.gpu).links)
    return partial(CostModel, tables, cluster.gpu, links)


def simulate(arrivals: Sequence[Arrival], setup: SimulationSetup) -> SimulationResult:
    """Serve a trace. Raises `ConfigError` for a trace without requests or an unknown policy, `PlacementError` when the
    cluster cannot hold the models, `ProfileError` for a model or size that was not profiled."""
    if not arrivals:
        raise ConfigError("the trace holds no requests: there is nothing to simulate")
    times, truth, workers = setup.make_times(), setup.make_times(), list(setup.workers)
    load = list(setup.load) if setup.load is not None else mix_of(arrivals)
    if find_policy(setup.policy).supports_units and (
        units := units_for(times, load, workers, setup.dispatch.handoff_reserve_bytes)
    ):
        times, truth = times.divided(units), truth.divided(units)
    policy = make_policy(setup.policy, times, workers, load, setup.dispatch)
    degrees = degrees_in_use(times, load, workers)
    orchestrator = Orchestrator(times, setup.dispatch.handoff_reserve_bytes, degrees, policy.one_pool)
    placement = start_placement(policy, orchestrator, load, workers)
    replanner = MonitoredReplanner(orchestrator, times, load, setup.replan) if policy.replanner_wanted else None
    options = replace(setup.scheduler, decode_order=policy.decode_order)
    scheduler = Scheduler(workers, placement, times, policy.dispatcher, options, replanner)
    engine = replace(setup.engine, decodes_in_tiles=policy.decodes_in_tiles)
    return SimulatedEngine(scheduler, workers, placement, truth, engine).run(arrivals)


def simulate_service(
    args: AppArgs, times: StageTimes, truth: StageTimes, arrivals: Sequence[Arrival], options: SimulationOptions
) -> SimulationResult:
    """Serve a trace with the workers, placement and scheduler of a configuration. `times` is what the scheduler goes by
    and corrects, `truth` how long stages take. The tick and the handoff buffers are those of the configuration, the
    rest of `options` holds. Raises what `deployments.assembly.planning` raises."""
    specs = service_workers(args)
    policy = policy_of(args, times, specs)
    placement = plan_placement(args, times, specs, policy)
    scheduler = make_scheduler(args, times, specs, policy, placement)
    options = replace(
        options,
        tick_s=args.dispatch.tick_ms / 1000,
        handoff_capacity_bytes=args.handoff.capacity_mb * MIB,
        group_bytes=group_bytes(args),
    )
    return SimulatedEngine(scheduler, specs, placement, truth, options).run(arrivals)


def service_workers(args: AppArgs) -> list[WorkerSpec]:
    """The workers of a configuration, each node full."""
    nodes = [f"node{node}" for node in range(args.cluster.nodes) for _ in range(args.cluster.workers_per_node)]
    return worker_specs(args, nodes)


def mix_of(arrivals: Sequence[Arrival]) -> list[LoadShare]:
    """The requests of a trace by kind, per second."""
    duration_s = max(arrival_s for arrival_s, _ in arrivals) or 1.0
    kinds = Counter((spec.model, spec.shape, spec.num_inference_steps) for _, spec in arrivals)
    return [LoadShare(*kind, weight=count / duration_s) for kind, count in sorted(kinds.items())]


def with_deadlines(arrivals: Sequence[Arrival], times: StageTimes, slo_scale: float | None = None) -> list[Arrival]:
    """The trace with an SLO on every request: its own, else `slo_scale` (2.5) times its latency at the optimal degrees
    (section 8.1), by the profile as it stands: so all policies meet the same deadlines, whatever they learn."""
    scale = DEFAULT_SLO_SCALE if slo_scale is None else slo_scale
    return [(arrival_s, _with_slo(spec, times, scale)) for arrival_s, spec in arrivals]


def _with_slo(spec: RequestSpec, times: StageTimes, scale: float) -> RequestSpec:
    if spec.slo_s is not None:
        return spec
    degrees = {stage: times.optimal_degree(spec.model, stage, spec.shape) for stage in Stage}
    return replace(spec, slo_s=scale * sum(stage_seconds(times, spec, stage, k) for stage, k in degrees.items()))
