"""Describes the present of a cluster, from the books of its scheduler."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from tridentserve.cluster import WorkerSpec
from tridentserve.scheduling.runs.ledger import Ledger
from tridentserve.scheduling.runs.request import Request
from tridentserve.scheduling.watching.cluster_state import (
    MAX_TOLD_CLASSES,
    MAX_TOLD_REQUESTS,
    Attainment,
    ClusterState,
    WatchedClass,
    WatchedPlan,
    WatchedRequest,
    WatchedWorker,
)
from tridentserve.scheduling.workers.fault_watch import FaultWatch
from tridentserve.scheduling.workers.shared_cores import list_coreless
from tridentserve.scheduling.workers.worker_pool import WorkerPool


def describe_present(pool: WorkerPool, ledger: Ledger, faults: FaultWatch, now_s: float) -> ClusterState:
    """The state of all workers and of the requests that have not ended, without what is past."""
    requests = ledger.requests
    coreless = list_coreless(pool)
    return ClusterState(
        now_s=now_s,
        workers=tuple(
            replace(
                _describe_worker(pool, ledger, spec, alive),
                coreless=spec.worker_id in coreless,
                aside_until_s=faults.find_until_s(spec.worker_id),
            )
            for spec, alive in pool.list_all()
        ),
        requests=tuple(_describe_request(request) for request in islice(requests.values(), MAX_TOLD_REQUESTS)),
        num_requests=len(requests),
        classes=_count_classes(requests.values()),
        attainment=_count_overdue(requests.values(), now_s),
    )


def _describe_worker(pool: WorkerPool, ledger: Ledger, spec: WorkerSpec, alive: bool) -> WatchedWorker:
    plans = []
    for plan_id, start_s, end_s in pool.list_given_plans(spec.worker_id):
        if (plan := ledger.find_plan(plan_id)) is not None:
            stages = "".join(stage.letter for stage in plan.stages)
            plans.append(WatchedPlan(plan_id, plan.model, stages, plan.degree, plan.request_ids, start_s, end_s))
    return WatchedWorker(
        worker_id=spec.worker_id,
        node_id=spec.node_id,
        alive=alive,
        placement=pool.placement.describe(spec.worker_id),
        plans=tuple(plans),
        reserved_until_s=pool.reserved_until_s(spec.worker_id),
    )


def _describe_request(request: Request) -> WatchedRequest:
    spec = request.spec
    return WatchedRequest(
        request_id=spec.request_id,
        model=spec.model,
        size=_name_size(request),
        num_steps=spec.num_inference_steps,
        steps_done=request.steps_done,
        running=request.run is not None,
        arrival_s=request.arrival_s,
        deadline_s=request.deadline_s,
    )


def _count_overdue(requests: Iterable[Request], now_s: float) -> dict[str, Attainment]:
    """The requests whose deadline has passed, by model."""
    counts = Counter(request.spec.model for request in requests if request.deadline_s < now_s)
    return {model: Attainment(overdue=count) for model, count in counts.items()}


def _count_classes(requests: Iterable[Request]) -> tuple[WatchedClass, ...]:
    """The classes with most requests, those with most waiting requests first."""
    waiting: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    running: defaultdict[tuple[str, str], int] = defaultdict(int)
    for request in requests:
        key = (request.spec.model, _name_size(request))
        if request.run is None:
            waiting[key].append(request.arrival_s)
        else:
            running[key] += 1
    keys = sorted({*waiting, *running}, key=lambda key: (-len(waiting[key]), -running[key], key))
    return tuple(
        WatchedClass(model, size, len(waited), running[model, size], min(waited, default=None))
        for model, size in keys[:MAX_TOLD_CLASSES]
        for waited in [waiting[model, size]]
    )


def _name_size(request: Request) -> str:
    shape = request.spec.shape
    frames = f"x{shape.num_frames}" if shape.num_frames > 1 else ""
    return f"{shape.width}x{shape.height}{frames}"
