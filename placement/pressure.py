"""How well a placement fits a load: the work that arrives for each set of workers that hold the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from placement.demands import ClusterCosts
from placement.virtual_replicas import Fit
from profiler.monitor import StageSpeed
from tridentserve.errors import PlacementError
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.stages import PlacementType, VirtualReplica


def stage_speeds(
    plan: PlacementPlan, load: Sequence[LoadShare], costs: ClusterCosts
) -> dict[frozenset[Replica], StageSpeed]:
    """Per set of replicas: its workers, and the GPU-seconds per second that the load brings them.

    Every request counts where it communicates least: at the first virtual replica V0..V3 that fits it and that the plan
    has (TridentServe, arXiv 2510.02838, section 6.1). Workers of one type share its work evenly. Raises
    `PlacementError` for a request that the plan cannot run, `ProfileError` for one that is not profiled.
    """
    held = Counter(filter(None, plan.replicas.values()))
    holders: defaultdict[tuple[str, PlacementType], int] = defaultdict(int)
    for replicas, workers in held.items():
        for role in _roles(replicas):
            holders[role] += workers
    work: defaultdict[tuple[str, PlacementType], float] = defaultdict(float)
    squared: defaultdict[tuple[str, PlacementType], float] = defaultdict(float)
    for share in load:
        if share.weight > 0:
            fit = _fit(share, holders, costs)
            for kind in (fit.replica.primary, *fit.replica.auxiliaries):
                seconds = costs.gpu_seconds(share, fit, kind.stages)
                work[share.model, kind] += share.weight * seconds
                squared[share.model, kind] += share.weight * seconds**2
    speeds = {}
    for replicas, workers in held.items():
        parts = {role: workers / holders[role] for role in _roles(replicas)}
        speeds[replicas] = StageSpeed(
            workers,
            sum(part * work[role] for role, part in parts.items()),
            sum(part**2 * squared[role] for role, part in parts.items()),
        )
    return speeds


def _roles(replicas: frozenset[Replica]) -> list[tuple[str, PlacementType]]:
    roles = []
    for model in sorted({replica.model for replica in replicas}):
        kind = PlacementType.of(replica.stage for replica in replicas if replica.model == model)
        if kind is not None:
            roles.append((model, kind))
    return roles


def _fit(share: LoadShare, holders: dict[tuple[str, PlacementType], int], costs: ClusterCosts) -> Fit:
    for replica in VirtualReplica:
        if all(holders.get((share.model, kind)) for kind in (replica.primary, *replica.auxiliaries)):
            fit = costs.fit(share.model, replica, share.shape)
            if fit is not None:
                return fit
    raise PlacementError(f"{share.model} at {share.shape} cannot run: no virtual replica of the placement fits it")
