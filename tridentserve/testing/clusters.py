"""Small clusters and requests, and the simulation of a policy on them.

The authors of policies need nothing but `tridentserve` for a test, which may not import the assembly of `deployments`.
So the scheduler and the engine are put together here, around a dispatcher that need not have a name; what the workers
reserve is that of `WorkerOptions`, as in the service.
"""

from __future__ import annotations

from collections.abc import Mapping

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated import SimulatedEngine, SimulationOptions, SimulationResult
from tridentserve.plans import PlacementPlan, Replica, WorkerId
from tridentserve.protocols import Dispatcher, Replanner, StageTimes
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.scheduler import Scheduler, SchedulerOptions
from tridentserve.stages import PlacementType
from tridentserve.testing.fixed_times import FixedTimes

# The model that the workers hold and the requests ask for.
MODEL = "m"
_SHAPE = Shape(512, 512)
# Memory of a worker, in the small numbers of `FixedTimes`.
_MEMORY_BYTES = 100


def make_cluster(
    types: Mapping[WorkerId, str], memory_bytes: int = _MEMORY_BYTES
) -> tuple[list[WorkerSpec], PlacementPlan]:
    """Workers by id and placement type ("" for none), each with `memory_bytes`, and their placement. A worker "n1/a" is
    on node n1, a worker "a" on node n0."""
    specs = [WorkerSpec(name, name.rpartition("/")[0] or "n0", memory_bytes) for name in types]
    held = {
        name: frozenset(Replica(MODEL, stage) for stage in PlacementType(kind).stages) if kind else frozenset[Replica]()
        for name, kind in types.items()
    }
    return specs, PlacementPlan(held)


def make_request(request_id: str, steps: int = 4, slo_s: float | None = None, shape: Shape = _SHAPE) -> RequestSpec:
    """A request for one output. Without `slo_s` its deadline is the default of `SchedulerOptions.slo_scale`."""
    return RequestSpec(request_id, MODEL, shape, steps, slo_s=slo_s)


def simulate_dispatcher(
    dispatcher: Dispatcher,
    types: Mapping[WorkerId, str],
    arrivals: Mapping[str, float],
    times: StageTimes | None = None,
    *,
    memory_bytes: int = _MEMORY_BYTES,
    replanner: Replanner | None = None,
    scheduler_options: SchedulerOptions | None = None,
    options: SimulationOptions | None = None,
) -> tuple[SimulationResult, list[WorkerSpec]]:
    """Simulate a cluster (see `make_cluster`) on which a policy decides, and requests of four steps that arrive at
    these times, in seconds, by request id. Returns the result and the workers, as `find_violations` takes them.

    `times` are the stage times of the cluster (default: `FixedTimes()`); the dispatcher may hold the same object.
    `memory_bytes` is what each worker has for weights and activations. The handoff buffer and the process groups come
    on top, so that a policy has to know of them, as it has in the service: a worker's memory is `memory_bytes` and
    `SimulationOptions.reserve_bytes`, by default `WorkerOptions().reserve_bytes`."""
    times = times or FixedTimes()
    options = options or SimulationOptions(keep_plans=True)
    workers, placement = make_cluster(types, memory_bytes + options.reserve_bytes)
    scheduler = Scheduler(workers, placement, times, dispatcher, scheduler_options, replanner)
    engine = SimulatedEngine(scheduler, workers, placement, times, options)
    result = engine.run((at_s, make_request(name)) for name, at_s in arrivals.items())
    return result, workers
