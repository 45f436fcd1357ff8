"""Pipeline-level resource allocation: E, D and C of a request on the same k workers, as one plan (section 8.1, B1-B4).

Memory is not looked at: on a model that does not fit beside its activations, the engine reports out of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.options import DispatchOptions
from dispatch.policies.greedy.lanes import Offer
from dispatch.policies.greedy.work import WorkTimes, covered_degrees, needs_encode
from dispatch.workers.memory_fit import Fits
from dispatch.workers.pools import Pool
from tridentserve.plans import WorkerId
from tridentserve.protocols import Assignment, PendingRequest, StageTimes
from tridentserve.stages import PlacementType


class PipelineLevel:
    """All stages are given the workers of D (a stage that gains nothing from them lets them wait)."""

    def __init__(
        self, times: StageTimes, fits: Fits, options: DispatchOptions, pools: Sequence[Pool], now_s: float
    ) -> None:
        self.work = WorkTimes(times, aligned=True)
        self._max_degree = options.max_degree
        self._now_s = now_s

    def degrees(self, request: PendingRequest, pool: Pool) -> Sequence[int] | str:
        if (kind := pool.types[request.spec.model]) is not PlacementType.EDC:
            return f"{kind} workers hold no whole pipeline"
        widest = min(pool.largest_node, self._max_degree or pool.largest_node)
        degrees = covered_degrees(self.work.times, request.spec, widest)
        return degrees or f"it was not profiled at degree {widest}, the widest here, or a narrower one"

    def finish_s(self, request: PendingRequest, primary: PlacementType, degree: int) -> float:
        return self._now_s + self.work.run_s(request, degree)

    def assign(self, request: PendingRequest, offer: Offer, workers: tuple[WorkerId, ...], why: str) -> Assignment:
        return Assignment(
            request_ids=(request.spec.request_id,),
            primary=offer.primary,
            encode=workers if needs_encode(request) else (),
            diffuse=workers,
            decode=workers,
            expected_finish_s=offer.finish_s,
            reason=f"{why}, all stages",
        )
