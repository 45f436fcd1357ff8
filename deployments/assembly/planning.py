"""The one place where schedulers are put together: for the service, simulations, the check of a configuration, the
replay of a decision log, and benchmarks. No Ray, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deployments.assembly.expected_load import list_expected_load
from deployments.assembly.options import ServiceOptions, make_service_options
from deployments.config.app import AppArgs
from dispatch.policies import Policy, find_policy, make_policy
from placement import LoadShare, MonitoredReplanner, Orchestrator, build_fixed_placement
from placement.shares import choose_shares
from profiler import CostModel
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.protocols import Replanner, StageTimes
from tridentserve.scheduling.prediction.scene import SharingRules
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.stages import Stage
from tridentserve.weights_share import WeightsShare


@dataclass(frozen=True, slots=True)
class Planners:
    """A scheduler, and what it is made of."""

    policy: Policy
    placement: PlacementPlan
    scheduler: Scheduler


def assemble(
    options: ServiceOptions,
    times: StageTimes,
    workers: Sequence[WorkerSpec],
    load: Sequence[LoadShare],
    placement: PlacementPlan | None = None,
) -> Planners:
    """The planners for workers whose placement is planned for `load`, where no other one is given. Raises `ConfigError`
    for an unknown policy, `PlacementError` when the workers cannot hold the models, `ProfileError` for what was not
    profiled."""
    policy = _make_policy(options, times, workers, load)
    placement = placement or _plan_start(options, times, workers, load, policy)
    follows = _follows_load(options, policy, is_planned=True)
    replanner = _make_replanner(options, times, workers, load, policy) if follows else None
    return Planners(policy, placement, _make_scheduler(options, times, workers, policy, placement, replanner))


def plan_placement(
    options: ServiceOptions, times: StageTimes, workers: Sequence[WorkerSpec], load: Sequence[LoadShare]
) -> PlacementPlan:
    """The placement that `assemble` starts with, which depends on the policy. Raises what `assemble` raises."""
    return _plan_start(options, times, workers, load, _make_policy(options, times, workers, load))


def share_stages(
    options: ServiceOptions, times: CostModel, workers: Sequence[WorkerSpec], load: Sequence[LoadShare]
) -> dict[Replica, WeightsShare]:
    """The stages whose weights units of workers have to hold together (`placement.shares.choose_shares`); none under a
    policy that has no units."""
    if not find_policy(options.policy).supports_units:
        return {}
    return choose_shares(times, load, workers, options.worker.reserve_bytes)


def assemble_service(
    args: AppArgs,
    times: StageTimes,
    specs: Sequence[WorkerSpec],
    *,
    alter: Callable[[Policy], Policy] = lambda policy: policy,
    replanner: Replanner | None = None,
    placement: PlacementPlan | None = None,
) -> Planners:
    """The planners of the service that a configuration describes. `alter` and `replanner` are for benchmarks and
    re-runs: another policy in place of the configured one, another replanner in place of the service's own.
    `placement`: the one to start with, where it is not that of the configuration.

    Raises `ConfigError`, beginning with the key at fault, for what cannot work on these workers."""
    options, load = make_service_options(args), list_expected_load(args, times)
    with _name_key(f"dispatch.policy: {args.dispatch.policy}"):
        policy = alter(_make_policy(options, times, specs, load))
    if placement is None:
        with _name_key("placement"):
            placement = make_placement(args, times, specs, policy)
    if replanner is None and _follows_load(options, policy, is_planned=args.placement == "auto"):
        replanner = _make_replanner(options, times, specs, load, policy)
    return Planners(policy, placement, _make_scheduler(options, times, specs, policy, placement, replanner))


def make_placement(
    args: AppArgs, times: StageTimes, specs: Sequence[WorkerSpec], policy: Policy | None = None
) -> PlacementPlan:
    """The start placement of a service: as configured, else what the policy stands for (a new one without `policy`),
    else the Orchestrator's for the expected load. Raises `PlacementError`."""
    options, load = make_service_options(args), list_expected_load(args, times)
    policy = policy or _make_policy(options, times, specs, load)
    if args.placement != "auto":
        return build_fixed_placement(args.placement, specs, [model.name for model in args.models])
    return _plan_start(options, times, specs, load, policy)


def list_workers(args: AppArgs, nodes: Sequence[str], prefix: str = "") -> list[WorkerSpec]:
    """One worker per entry of `nodes`, which names the node of each. Ids are `n<node>w<index in node>` after
    `prefix`."""
    order = list(dict.fromkeys(nodes))
    counts = dict.fromkeys(order, 0)
    specs = []
    for node in nodes:
        specs.append(
            WorkerSpec(
                worker_id=f"{prefix}n{order.index(node)}w{counts[node]}",
                node_id=node,
                memory_bytes=args.cluster.memory_bytes,
                device=args.cluster.device_name,
                place=counts[node],
                max_denoising=args.cluster.max_denoising,
            )
        )
        counts[node] += 1
    return specs


def list_service_workers(args: AppArgs) -> list[WorkerSpec]:
    """The workers of a configuration before its nodes are known, each node full."""
    nodes = [f"node{node}" for node in range(args.cluster.nodes) for _ in range(args.cluster.workers_per_node)]
    return list_workers(args, nodes)


def find_hot_width(args: AppArgs, times: StageTimes) -> int:
    """The most members of process groups that are made before a plan asks for them: the widest degree in use, and no
    more than workers keep the groups of."""
    widest: int = max(degree for model in args.models for degree in times.degrees(model.name, Stage.DIFFUSE))
    return min(widest, 1 << args.cluster.max_groups)


def list_degrees_in_use(times: StageTimes, load: Sequence[LoadShare], workers: Sequence[WorkerSpec]) -> list[int]:
    """The profiled degrees of D that a node can form."""
    largest_node = max(Counter(worker.node_id for worker in workers).values())
    models = {share.model for share in load}
    degrees = {degree for model in models for degree in times.degrees(model, Stage.DIFFUSE)}
    return sorted(degree for degree in degrees if degree <= largest_node)


def _make_policy(
    options: ServiceOptions, times: StageTimes, workers: Sequence[WorkerSpec], load: Sequence[LoadShare]
) -> Policy:
    """A new one: policies remember things."""
    dispatch = replace(options.dispatch, handoff_reserve_bytes=options.worker.reserve_bytes)
    return make_policy(options.policy, times, workers, load, dispatch)


def _plan_start(
    options: ServiceOptions,
    times: StageTimes,
    workers: Sequence[WorkerSpec],
    load: Sequence[LoadShare],
    policy: Policy,
) -> PlacementPlan:
    """The placement that the policy stands for, else the Orchestrator's plan for this load, under which kinds of weight
    0 can be served too."""
    if policy.placement is not None:
        return policy.placement
    return _make_orchestrator(options, times, workers, load, policy).plan(load, workers, keep=load)


def _make_replanner(
    options: ServiceOptions,
    times: StageTimes,
    workers: Sequence[WorkerSpec],
    load: Sequence[LoadShare],
    policy: Policy,
) -> MonitoredReplanner:
    orchestrator = _make_orchestrator(options, times, workers, load, policy)
    return MonitoredReplanner(orchestrator, times, load, options.replan, options.windows_s)


def _make_orchestrator(
    options: ServiceOptions,
    times: StageTimes,
    workers: Sequence[WorkerSpec],
    load: Sequence[LoadShare],
    policy: Policy,
) -> Orchestrator:
    degrees = list_degrees_in_use(times, load, workers)
    return Orchestrator(
        times,
        options.worker.reserve_bytes,
        degrees,
        policy.one_pool,
        together=policy.all_together,
        by_work=policy.shares_by_work,
    )


def _make_scheduler(
    options: ServiceOptions,
    times: StageTimes,
    workers: Sequence[WorkerSpec],
    policy: Policy,
    placement: PlacementPlan,
    replanner: Replanner | None,
) -> Scheduler:
    scheduler = replace(options.scheduler, decode_order=policy.decode_order)
    dispatch = options.dispatch
    values = dispatch.objective
    sharing = SharingRules(dispatch.min_efficiency, values.horizon, values.spare, values.hopeless, dispatch.max_degree)
    return Scheduler(workers, placement, times, policy.dispatcher, scheduler, replanner, sharing)


def _follows_load(options: ServiceOptions, policy: Policy, is_planned: bool) -> bool:
    """True when a replanner is wanted. `is_planned`: the placement at the start is planned, not written down."""
    if options.replans is None:
        return is_planned and policy.replanner_wanted
    if options.replans and not policy.replanner_wanted:
        raise ConfigError(f"replan.enabled: policy {policy.name} keeps its first placement; leave `enabled` out")
    return options.replans


@contextmanager
def _name_key(key: str) -> Iterator[None]:
    """Put the key at fault before what is wrong."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{key}: {error}") from None
