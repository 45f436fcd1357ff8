"""Pipeline-level resource allocation: E, D and C of a request on the same k workers, as one plan (section 8.1, B1-B4).

Memory is not looked at: for a model that does not fit together with its activations, the engine reports out of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.assignment.assigning import AssignmentBuilder, StageEstimate
from dispatch.options import DispatchOptions
from dispatch.policies.greedy.bucket_view import GreedyCandidate
from dispatch.policies.greedy.work import WorkTimes, find_covered_degrees
from dispatch.workers.auxiliaries import Auxiliaries
from dispatch.workers.memory_fit import MemoryCheck
from dispatch.workers.pools import Pool, map_to_nodes
from tridentserve.plans import WorkerId
from tridentserve.protocols import Assignment, PendingRequest, StageTimes
from tridentserve.stages import PlacementType


class PipelineLevel:
    """All stages are given the workers of D (a stage that gains nothing from them lets them wait)."""

    def __init__(
        self, times: StageTimes, memory: MemoryCheck, options: DispatchOptions, pools: Sequence[Pool], now_s: float
    ) -> None:
        self.work = WorkTimes(times, aligned=True)
        self._max_degree = options.max_degree
        self._now_s = now_s
        self._builder = AssignmentBuilder(Auxiliaries(pools, map_to_nodes(pools), memory, times, now_s), now_s)

    def find_candidates(self, request: PendingRequest, index: int, pool: Pool) -> list[GreedyCandidate] | str:
        if (primary := pool.types[request.spec.model]) is not PlacementType.EDC:
            return f"{primary} workers hold no whole pipeline"
        widest = min(pool.largest_node, self._max_degree or pool.largest_node)
        degrees = find_covered_degrees(self.work.times, request.spec, widest)
        if not degrees:
            return f"it was not profiled at degree {widest}, the widest here, or a narrower one"
        return [GreedyCandidate(index, k, primary, self._now_s + self.work.run_s(request, k)) for k in degrees]

    def assign(
        self, request: PendingRequest, candidate: GreedyCandidate, workers: tuple[WorkerId, ...], why: str
    ) -> Assignment:
        degree = len(workers)
        encode = None if request.encoded else StageEstimate(self.work.encode_s(request, degree), degree)
        decode = StageEstimate(self.work.decode_s(request, degree), degree)
        diffuse_s = self.work.diffuse_s(request, degree)
        return self._builder.build(
            [request], candidate.primary, workers, encode, diffuse_s, decode, f"{why}, all stages"
        )
