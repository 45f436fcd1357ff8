"""Rules that every simulation must keep, whatever the policy, checked on its result."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tridentserve.cluster import WorkerSpec
from tridentserve.engine.simulated.result import FINISHED, UNFINISHED, PlanRecord, RequestResult, SimulationResult
from tridentserve.plans import WorkerId
from tridentserve.stages import Stage

# The times of a simulation are sums of many numbers.
_TOLERANCE_S = 1e-6


def find_violations(result: SimulationResult, workers: Sequence[WorkerSpec]) -> list[str]:
    """The broken rules, one sentence each, of a result that holds its plans (`SimulationOptions.keep_plans`).

    No worker runs two plans at once, memory never exceeds the device, no plan crosses a node, every request ends, and
    its stages follow each other.
    """
    specs = {spec.worker_id: spec for spec in workers}
    return [
        *_find_overlaps(result.plans),
        *(problem for plan in result.plans for problem in _find_misplaced(plan, specs)),
        *(problem for request in result.requests for problem in _find_disorder(request)),
        *(["more GPU-seconds were used than there were"] if result.utilisation > 1 + _TOLERANCE_S else []),
    ]


def _find_overlaps(plans: Sequence[PlanRecord]) -> Iterator[str]:
    by_worker: defaultdict[WorkerId, list[PlanRecord]] = defaultdict(list)
    for plan in plans:
        for worker_id in plan.workers:
            by_worker[worker_id].append(plan)
    for worker_id, ran in by_worker.items():
        ran.sort(key=lambda plan: (plan.start_s, plan.end_s, plan.plan_id))
        for before, after in itertools.pairwise(ran):
            if after.start_s < before.end_s:
                yield f"{worker_id} began plan {after.plan_id} before the end of plan {before.plan_id}"
            if after.plan_id < before.plan_id:
                yield f"{worker_id} ran plan {after.plan_id} after plan {before.plan_id}"


def _find_misplaced(plan: PlanRecord, specs: dict[WorkerId, WorkerSpec]) -> Iterator[str]:
    if len({specs[worker_id].node_id for worker_id in plan.workers}) > 1:
        yield f"plan {plan.plan_id} crosses nodes: {plan.workers}"
    # A plan that failed at its start used nothing.
    for worker_id, used_bytes in zip(plan.workers, plan.used_bytes, strict=False):
        if used_bytes > specs[worker_id].memory_bytes:
            yield f"plan {plan.plan_id} used {used_bytes} bytes of {specs[worker_id].memory_bytes} on {worker_id}"
    times = [plan.start_s, *(time_s for span in plan.spans for time_s in (span.start_s, span.end_s)), plan.end_s]
    if any(after < before - _TOLERANCE_S for before, after in itertools.pairwise(times)):
        yield f"plan {plan.plan_id} has stages out of order or outside it: {times}"


def _find_disorder(request: RequestResult) -> Iterator[str]:
    name = request.spec.request_id
    if request.outcome == UNFINISHED or request.end_s is None:
        yield f"request {name} has not ended"
        return
    if request.end_s < request.arrival_s:
        yield f"request {name} ended before it arrived"
    if request.outcome != FINISHED:
        return
    stages = [run.stage for run in request.timeline]
    if stages[:1] != [Stage.ENCODE] or stages[-1:] != [Stage.DECODE] or stages.count(Stage.DECODE) != 1:
        yield f"request {name} finished after {stages}"
    steps = sum(run.steps or 0 for run in request.timeline)
    wanted = request.reduced_steps or request.spec.num_inference_steps
    if steps != wanted:
        yield f"request {name} finished after {steps} of {wanted} steps"
    times = [request.arrival_s, *(time_s for run in request.timeline for time_s in (run.start_s, run.end_s))]
    times.append(request.end_s)
    if any(after < before - _TOLERANCE_S for before, after in itertools.pairwise(times)):
        yield f"request {name} has stages that overlap: {times}"
