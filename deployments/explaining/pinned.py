"""A policy that runs one request at a given degree, as soon as so many workers of a node are free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from tridentserve.plans import Replica, WorkerId
from tridentserve.protocols import Assignment, ClusterView, Decisions, Dispatcher, PendingRequest, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.stages import PlacementType, Stage


class PinnedDegree:
    """Leaves all other requests to another policy, but for the free workers that it keeps for this one."""

    def __init__(self, inner: Dispatcher, request_id: str, degree: int) -> None:
        self._inner = inner
        self._request_id = request_id
        self._degree = degree

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return self._inner.can_ever_run(spec, workers)

    def decide(self, view: ClusterView) -> Decisions:
        pinned = next((each for each in view.pending if each.spec.request_id == self._request_id), None)
        if pinned is None:
            return self._inner.decide(view)
        kept = self._choose_workers(view, pinned)
        assignment = _assign(view, pinned, kept) if len(kept) == self._degree else None
        names = {worker.worker_id for worker in kept}
        workers = tuple(replace(worker, idle=False) if worker.worker_id in names else worker for worker in view.workers)
        others = tuple(each for each in view.pending if each is not pinned)
        rest = self._inner.decide(replace(view, pending=others, workers=workers)) if others else Decisions()
        if assignment is None:
            return rest
        return replace(rest, assignments=(assignment, *rest.assignments))

    def _choose_workers(self, view: ClusterView, pinned: PendingRequest) -> list[WorkerView]:
        """The free workers of the node with most of them that denoise for the model, and no more than wanted."""
        wanted = Replica(pinned.spec.model, Stage.DIFFUSE)
        nodes: defaultdict[str, list[WorkerView]] = defaultdict(list)
        for worker in view.workers:
            if worker.idle and wanted in worker.replicas:
                nodes[worker.node_id].append(worker)
        most = max(nodes.values(), key=len, default=[])
        return most[: self._degree]


def _assign(view: ClusterView, pinned: PendingRequest, chosen: Sequence[WorkerView]) -> Assignment | None:
    """E and C run on the first of its workers that holds them, else where there is least to do; None where nobody
    does."""
    diffuse = tuple(worker.worker_id for worker in chosen)
    encode = () if pinned.encoded else _find_holder(view, pinned, Stage.ENCODE, chosen[0])
    decode = _find_holder(view, pinned, Stage.DECODE, chosen[0])
    if encode is None or decode is None:
        return None
    if encode and encode[0] == diffuse[0]:
        encode = diffuse
    if decode[0] == diffuse[0]:
        decode = diffuse
    kind = PlacementType.of(each.stage for each in chosen[0].replicas if each.model == pinned.spec.model)
    reason = f"held for it, degree {len(diffuse)}"
    return Assignment((pinned.spec.request_id,), kind or PlacementType.D, encode, diffuse, decode, view.now_s, reason)


def _find_holder(
    view: ClusterView, pinned: PendingRequest, stage: Stage, leader: WorkerView
) -> tuple[WorkerId, ...] | None:
    wanted = Replica(pinned.spec.model, stage)
    if wanted in leader.replicas:
        return (leader.worker_id,)
    holders = [worker for worker in view.workers if wanted in worker.replicas]
    return (min(holders, key=lambda worker: worker.free_at_s).worker_id,) if holders else None
