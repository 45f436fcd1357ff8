"""Makes the summary of a scheduler's load (`tridentserve.cells.summary`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tridentserve.cells.summary import CellModelLoad, CellSummary
from tridentserve.plans import Replica
from tridentserve.protocols import PendingRequest, StageTimes, WorkerView
from tridentserve.scheduling.estimation.request_work import estimate_work
from tridentserve.stages import Stage


@dataclass(slots=True)
class _Alike:
    """Workers that hold the same replicas."""

    num_workers: int = 0
    num_idle: int = 0
    work_s: float = 0.0
    """Seconds of work of all of them together."""


def summarize_load(
    workers: Iterable[WorkerView], pending: Iterable[PendingRequest], times: StageTimes, now_s: float
) -> CellSummary:
    """The summary of these live workers, and of the requests that wait for them: each model's work is in equal parts on
    the workers that hold its D."""
    kinds: defaultdict[frozenset[Replica], _Alike] = defaultdict(_Alike)
    for worker in workers:
        kind = kinds[worker.replicas]
        kind.num_workers += 1
        kind.num_idle += worker.idle
        kind.work_s += max(0.0, worker.free_at_s - now_s)
    holders: defaultdict[str, list[_Alike]] = defaultdict(list)
    for replicas, kind in kinds.items():
        for replica in replicas:
            if replica.stage is Stage.DIFFUSE:
                holders[replica.model].append(kind)
    for model, waiting_s in _sum_waiting(pending, times).items():
        num_workers = sum(kind.num_workers for kind in holders[model])
        for kind in holders[model]:
            kind.work_s += waiting_s * kind.num_workers / num_workers
    loads = {model: _sum_load(held) for model, held in sorted(holders.items()) if held}
    return CellSummary(loads)


def _sum_load(kinds: Sequence[_Alike]) -> CellModelLoad:
    num_workers = sum(kind.num_workers for kind in kinds)
    work_s = sum(kind.work_s for kind in kinds) / num_workers
    return CellModelLoad(num_workers, sum(kind.num_idle for kind in kinds), work_s)


def _sum_waiting(pending: Iterable[PendingRequest], times: StageTimes) -> defaultdict[str, float]:
    """GPU-seconds that wait, by model."""
    waiting_s: defaultdict[str, float] = defaultdict(float)
    known: dict[tuple[object, ...], float] = {}
    for request in pending:
        spec = request.spec
        key = (spec.model, spec.shape, spec.num_inference_steps, spec.num_outputs)
        if key not in known:
            known[key] = estimate_work(times, spec).gpu_seconds
        share = 1 - request.steps_done / spec.num_inference_steps
        waiting_s[spec.model] += known[key] * share
    return waiting_s
