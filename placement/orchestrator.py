"""The Dynamic Orchestrator: which stages each worker holds (Algorithm 2 of TridentServe, arXiv 2510.02838, 6.1)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from placement.demands import ClusterCosts, MeasuredRates, ReplicaDemand
from placement.packing import Group, Portion, group_portions, pack_per_machine, stack_models
from placement.split import pad_to_degrees, place_together, serves_as_much, share_in_units, split
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import PlacementError
from tridentserve.load import LoadShare
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.protocols import StageTimes


class Orchestrator:
    """Makes placement plans from stage times and a load. Pure: the same input gives the same plan.

    Differs from Algorithm 2 in four points. Every worker holds all stages where that serves at least as much
    (`placement.split`). Else all requests of a model use one virtual replica, the first that runs them
    all: with several, each has its own primaries, and some wait while others are idle. What is saved by running each
    request on its own first one is a transfer of milliseconds, where a request takes seconds. Workers are shared in
    proportion to the GPU-seconds that requests bring, not to their number: otherwise a rare heavy model next to a light
    one would get next to nothing. And a worker may hold replicas of several models: auxiliaries that are hardly used
    share one, and where there are fewer workers than the models need, each holds what fits.
    """

    def __init__(
        self,
        times: StageTimes,
        handoff_reserve_bytes: int,
        degrees: Sequence[int],
        one_pool: bool,
        *,
        together: bool | None = None,
        by_work: bool = True,
    ) -> None:
        """`degrees` are the degrees of D in use. `one_pool`: one virtual replica per model (see above); False: as in
        Algorithm 2. `together`: all stages on every worker where that serves as much; None: with `one_pool`.
        `by_work`: the virtual replicas of a model share by GPU-seconds; False: by the number of requests, as in
        Algorithm 2, which has one model. Raises `PlacementError` for a negative reserve or bad degrees."""
        if handoff_reserve_bytes < 0:
            raise PlacementError(f"handoff_reserve_bytes is {handoff_reserve_bytes}; it must not be negative")
        if not degrees or any(degree < 1 or degree & (degree - 1) for degree in degrees):
            raise PlacementError(f"degrees are {list(degrees)}; give powers of two, such as 1, 2, 4")
        self._times = times
        self._handoff_reserve_bytes = handoff_reserve_bytes
        self._degrees = tuple(sorted(set(degrees)))
        self._one_pool = one_pool
        self._together = one_pool if together is None else together
        self._by_work = by_work

    def build_costs(self, workers: Sequence[WorkerSpec]) -> ClusterCosts:
        """The costs of requests on these workers. Raises `PlacementError` for none, or one without memory."""
        _check_workers(workers)
        return ClusterCosts(self._times, workers, self._handoff_reserve_bytes, self._degrees)

    def plan(
        self,
        load: Sequence[LoadShare],
        workers: Sequence[WorkerSpec],
        epoch: int = 0,
        keep: Sequence[LoadShare] = (),
        rates: MeasuredRates | None = None,
    ) -> PlacementPlan:
        """A plan that covers E, D and C of every model in the load.

        `keep`: requests that must stay possible, of whatever weight; they get no more workers than that needs.
        `rates`: measured requests per second and worker of placement types, for Split; the profile's where missing.
        The worker with the least memory decides what fits. Raises `PlacementError` when a size fits nowhere, when
        there are too few workers for the models, and for an empty load or cluster; `ProfileError` for a model or size
        that is not profiled.
        """
        costs = self.build_costs(workers)
        if not any(share.weight > 0 for share in load):
            raise PlacementError("the load is empty; name at least one model and size with a weight above 0")
        asked = costs.group_demands(load, keep)
        demands = costs.merge_demands(costs.pool_demands(asked) if self._one_pool else asked, len(workers))
        if sum(demand.minimum for demand in demands) > len(workers):
            if self._together and serves_as_much(demands, None, self._times, costs, len(workers)):
                return place_together(demands, workers, costs, epoch)
            return _stack(demands, workers, costs, epoch)
        weights = [demand.gpu_seconds for demand in demands] if self._by_work else _weigh_by_number(demands)
        unit = max(unit for demand in demands for unit in demand.fit.units.values())
        shares = share_in_units(len(workers), weights, [demand.minimum for demand in demands], unit)
        portions = [
            _build_portion(demand, share, costs, rates or {}) for demand, share in zip(demands, shares, strict=True)
        ]
        if self._together and serves_as_much(demands, portions, self._times, costs, len(workers)):
            return place_together(demands, workers, costs, epoch)
        groups = group_portions(portions, costs)
        placed = pack_per_machine(groups, workers)
        for demand in demands:
            _check_degree(demand, placed, workers)
            _check_units(demand, placed)
        replicas = {w.worker_id: placed[w.worker_id].held if w.worker_id in placed else frozenset() for w in workers}
        return PlacementPlan(replicas, _explain(portions, groups, len(workers) - len(placed)), epoch)


def _weigh_by_number(demands: Sequence[ReplicaDemand]) -> list[float]:
    """The GPU-seconds of each model, divided among its virtual replicas by the number of their requests."""
    work, requests = defaultdict[str, float](float), defaultdict[str, float](float)
    numbers = [sum(share.weight for share in demand.load) for demand in demands]
    for demand, number in zip(demands, numbers, strict=True):
        work[demand.model] += demand.gpu_seconds
        requests[demand.model] += number
    return [
        work[demand.model] * number / requests[demand.model] for demand, number in zip(demands, numbers, strict=True)
    ]


def _build_portion(demand: ReplicaDemand, share: int, costs: ClusterCosts, measured: MeasuredRates) -> Portion:
    """Lines 7-8: primaries and auxiliaries by their rates, primaries padded to the degrees a node can form."""
    rates = costs.choose_rates(demand, measured)
    replica, units, degrees = demand.fit.replica, demand.fit.units, costs.find_memory_model(demand.model).degrees
    counts = split(replica, share, rates, demand.fit.min_degree, units)
    return Portion(demand, pad_to_degrees(replica, counts, rates, degrees, units), rates)


def _explain(portions: Sequence[Portion], groups: Sequence[Group], left_over: int) -> str:
    total = sum(portion.demand.gpu_seconds for portion in portions)
    parts = []
    for portion in portions:
        units = portion.demand.fit.units
        what = ", ".join(f"{n} {kind}{_describe_unit(units[kind])}" for kind, n in portion.counts.items())
        share = portion.demand.gpu_seconds / total
        parts.append(f"{portion.demand.model} {portion.demand.fit.replica} brings {share:.0%} of the work: {what}")
    for group in groups:
        if group.other_replicas:
            others = ", ".join(f"{replica.model} {replica.stage.letter}" for replica in sorted(group.other_replicas))
            parts.append(f"the worker with {group.model} {group.kind} holds {others} too")
    if left_over:
        parts.append(f"{left_over} workers hold nothing: they make no whole unit in a node")
    return "; ".join(parts)


def _describe_unit(unit: int) -> str:
    return f" in units of {unit}" if unit > 1 else ""


def _stack(
    demands: Sequence[ReplicaDemand], workers: Sequence[WorkerSpec], costs: ClusterCosts, epoch: int
) -> PlacementPlan:
    held: Mapping[WorkerId, frozenset[Replica]] | None = stack_models(demands, workers, costs)
    needs = ", ".join(f"{demand.model} {demand.fit.replica} {demand.minimum}" for demand in demands)
    if held is None:
        raise PlacementError(
            f"{len(workers)} workers are too few; needed at least: {needs}; and the models do not fit on top of each "
            f"other. Add workers, or memory"
        )
    reason = f"{len(workers)} workers hold several models each, as their smallest sets are more: {needs}"
    return PlacementPlan(held, reason, epoch)


def _check_degree(demand: ReplicaDemand, placed: Mapping[WorkerId, Group], workers: Sequence[WorkerSpec]) -> None:
    """Some node must have enough primaries together for the narrowest degree that memory allows."""
    primary, degree = (demand.model, demand.fit.replica.primary), demand.fit.min_degree
    together = Counter(
        worker.node_id
        for worker in workers
        if (group := placed.get(worker.worker_id)) is not None and (group.model, group.kind) == primary
    )
    most = max(together.values(), default=0)
    if most < degree:
        raise PlacementError(
            f"{demand.model} needs {degree} {primary[1]} workers in one node and gets {most}; "
            f"add workers to a node, or give them more memory"
        )


def _check_units(demand: ReplicaDemand, placed: Mapping[WorkerId, Group]) -> None:
    """Every auxiliary type must have found a unit."""
    there = {(group.model, group.kind) for group in placed.values()}
    for kind, unit in demand.fit.units.items():
        if unit > 1 and (demand.model, kind) not in there:
            raise PlacementError(
                f"{demand.model} needs {unit} {kind} workers side by side in one node and no node has as many left; "
                f"add a node, or give workers more memory"
            )


def _check_workers(workers: Sequence[WorkerSpec]) -> None:
    if not workers:
        raise PlacementError("there are no workers to place stages on; add workers to the cluster")
    for worker in workers:
        if worker.memory_bytes <= 0:
            raise PlacementError(f"worker {worker.worker_id} has {worker.memory_bytes} bytes of memory; give it some")
    worker_id, n = Counter(worker.worker_id for worker in workers).most_common(1)[0]
    if n > 1:
        raise PlacementError(f"worker {worker_id} is in the cluster {n} times; ids must be unique")
