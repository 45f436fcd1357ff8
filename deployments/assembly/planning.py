"""From the configuration to the planners: workers, policy, start placement, scheduler. No Ray, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from deployments.config.app import AppArgs
from dispatch import DispatchOptions
from dispatch.options import SolverName
from dispatch.policies import Policy, find_policy, make_policy
from placement import LoadShare, MonitoredReplanner, Orchestrator, ReplanOptions, fixed_placement
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import StageTimes
from tridentserve.scheduling.estimation.hot_groups import GROUP_BYTES, HotGroup, hot_set
from tridentserve.scheduling.scheduler import Scheduler, SchedulerOptions
from tridentserve.stages import Stage

_MIB = 2**20
_SOLVERS: dict[str, SolverName] = {"highs": "HiGHS", "cbc": "CBC"}


def worker_specs(args: AppArgs, nodes: Sequence[str]) -> list[WorkerSpec]:
    """One worker per entry of `nodes`, which names the node of each. Ids are `n<node>w<index in node>`."""
    order = list(dict.fromkeys(nodes))
    counts = dict.fromkeys(order, 0)
    specs = []
    for node in nodes:
        specs.append(
            WorkerSpec(
                worker_id=f"n{order.index(node)}w{counts[node]}",
                node_id=node,
                memory_bytes=args.cluster.memory_mb * _MIB,
                device=args.cluster.device_name,
                place=counts[node],
            )
        )
        counts[node] += 1
    return specs


def policy_of(args: AppArgs, times: StageTimes, specs: Sequence[WorkerSpec]) -> Policy:
    """Who decides what runs where, new: policies remember things. Raises `ConfigError` where the policy cannot work on
    this cluster."""
    options = DispatchOptions(
        min_efficiency=args.dispatch.min_efficiency,
        max_degree=args.dispatch.max_degree,
        handoff_reserve_bytes=_reserve_bytes(args),
        max_batch=args.dispatch.max_batch or find_policy(args.dispatch.policy).default_max_batch,
        overdue_first=args.dispatch.overdue_first,
        solver=_SOLVERS[args.dispatch.solver],
        time_limit_s=args.dispatch.time_limit_ms / 1000,
    )
    return make_policy(args.dispatch.policy, times, specs, _expected_load(args), options)


def plan_placement(args: AppArgs, times: StageTimes, specs: Sequence[WorkerSpec], policy: Policy) -> PlacementPlan:
    """The start placement: as configured, else what the policy stands for, else the Orchestrator's for the expected
    load. Raises `PlacementError`."""
    if args.placement != "auto":
        return fixed_placement(args.placement, specs, [model.name for model in args.models])
    return start_placement(policy, _orchestrator(args, times, specs, policy), _expected_load(args), specs)


def make_scheduler(
    args: AppArgs, times: StageTimes, specs: Sequence[WorkerSpec], policy: Policy, placement: PlacementPlan
) -> Scheduler:
    """The pure scheduler with the policy, and with a replanner where one is wanted. Raises `ConfigError`, beginning
    with the key at fault, for replanning that the policy does not allow."""
    options = SchedulerOptions(
        slo_scale={model.name: model.slo_scale for model in args.models},
        max_retries=args.max_retries,
        checkpoint_s=args.checkpoints.every_s,
        checkpoint_steps=args.checkpoints.every_steps,
        decode_order=policy.decode_order,
    )
    replanner = _replanner(args, times, specs, policy) if _wants_replanner(args, policy) else None
    return Scheduler(specs, placement, times, policy.dispatcher, options, replanner)


def hot_groups(
    args: AppArgs, times: StageTimes, specs: Sequence[WorkerSpec], placement: PlacementPlan
) -> tuple[HotGroup, ...]:
    """The process groups to make at the start: up to the widest degree in use, and no more than workers keep."""
    widest = max(degree for model in args.models for degree in times.degrees(model.name, Stage.DIFFUSE))
    return tuple(hot_set(specs, placement, min(widest, 2**args.cluster.max_groups)))


def start_placement(
    policy: Policy, orchestrator: Orchestrator, load: Sequence[LoadShare], workers: Sequence[WorkerSpec]
) -> PlacementPlan:
    """What the policy stands for, else the Orchestrator's plan for this load."""
    return policy.placement if policy.placement is not None else orchestrator.plan(load, workers)


def degrees_in_use(times: StageTimes, load: Sequence[LoadShare], workers: Sequence[WorkerSpec]) -> list[int]:
    """The profiled degrees of D that a node can form."""
    largest_node = max(Counter(worker.node_id for worker in workers).values())
    models = {share.model for share in load}
    degrees = {degree for model in models for degree in times.degrees(model, Stage.DIFFUSE)}
    return sorted(degree for degree in degrees if degree <= largest_node)


def _wants_replanner(args: AppArgs, policy: Policy) -> bool:
    if args.replan.enabled is None:
        return args.placement == "auto" and policy.replanner_wanted
    if args.replan.enabled and not policy.replanner_wanted:
        raise ConfigError(f"replan.enabled: policy {policy.name} keeps its first placement; leave `enabled` out")
    return args.replan.enabled


def _replanner(args: AppArgs, times: StageTimes, specs: Sequence[WorkerSpec], policy: Policy) -> MonitoredReplanner:
    options = ReplanOptions(
        window_s={model.name: model.window_s for model in args.models if model.window_s is not None},
        default_window_s=args.replan.window_s,
        **args.replan.model_dump(exclude={"enabled", "window_s"}),
    )
    return MonitoredReplanner(_orchestrator(args, times, specs, policy), times, _expected_load(args), options)


def _orchestrator(args: AppArgs, times: StageTimes, specs: Sequence[WorkerSpec], policy: Policy) -> Orchestrator:
    degrees = degrees_in_use(times, _expected_load(args), specs)
    return Orchestrator(times, _reserve_bytes(args), degrees, policy.one_pool)


def _reserve_bytes(args: AppArgs) -> int:
    """What the handoff buffer and the process groups take of each worker's memory."""
    return args.handoff.capacity_mb * _MIB + group_bytes(args)


def group_bytes(args: AppArgs) -> int:
    """What the process groups take of each worker's memory."""
    return args.cluster.max_groups * GROUP_BYTES[args.cluster.device]


def _expected_load(args: AppArgs) -> list[LoadShare]:
    return [
        LoadShare(entry.model, entry.shape, entry.num_inference_steps, entry.weight) for entry in args.expected_load
    ]
