"""From the configuration to the planners: workers, start placement, scheduler. No Ray, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.config import AppArgs
from dispatch import DispatchOptions, IlpDispatcher
from dispatch.options import SolverName
from placement import LoadShare, Orchestrator, fixed_placement
from tridentserve.cluster import WorkerSpec
from tridentserve.plans import PlacementPlan
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.scheduler import Scheduler, SchedulerOptions
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
            )
        )
        counts[node] += 1
    return specs


def plan_placement(args: AppArgs, times: StageTimes, specs: Sequence[WorkerSpec]) -> PlacementPlan:
    """The start placement: as configured, or from the profile and the expected load. Raises `PlacementError`."""
    names = [model.name for model in args.models]
    if args.placement != "auto":
        return fixed_placement(args.placement, specs, names)
    degrees = sorted({degree for name in names for degree in times.degrees(name, Stage.DIFFUSE)})
    usable = [degree for degree in degrees if degree <= args.cluster.workers_per_node]
    load = [
        LoadShare(entry.model, Shape(entry.height, entry.width), entry.num_inference_steps, entry.weight)
        for entry in args.expected_load
    ]
    return Orchestrator(times, args.handoff.capacity_mb * _MIB, usable).plan(load, specs)


def make_scheduler(
    args: AppArgs, times: StageTimes, specs: Sequence[WorkerSpec], placement: PlacementPlan
) -> Scheduler:
    """The pure scheduler with the default dispatcher."""
    dispatcher = IlpDispatcher(
        times,
        DispatchOptions(
            solver=_SOLVERS[args.dispatch.solver],
            time_limit_s=args.dispatch.time_limit_ms / 1000,
            max_degree=args.dispatch.max_degree,
            handoff_reserve_bytes=args.handoff.capacity_mb * _MIB,
        ),
    )
    options = SchedulerOptions(
        slo_scale={model.name: model.slo_scale for model in args.models}, max_retries=args.max_retries
    )
    return Scheduler(specs, placement, times, dispatcher, options)
