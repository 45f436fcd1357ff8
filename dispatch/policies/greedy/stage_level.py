"""Stage-level resource allocation: each stage has its own workers (section 8.1, B5 and B6).

D has k primaries. E and C, which gain next to nothing from more than one worker, go to the auxiliary that is free
first, or stay with D where its workers hold them (E on all of them, C on the leader alone).
"""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.assignment.assigning import AssignmentBuilder, StageEstimate
from dispatch.candidates.survey import find_route
from dispatch.candidates.work import Work
from dispatch.options import DispatchOptions
from dispatch.policies.greedy.bucket_view import GreedyCandidate
from dispatch.policies.greedy.work import WorkTimes
from dispatch.workers.auxiliaries import Auxiliaries
from dispatch.workers.memory_fit import MemoryCheck
from dispatch.workers.pools import Pool, map_to_nodes
from tridentserve.plans import WorkerId
from tridentserve.protocols import Assignment, PendingRequest, StageTimes
from tridentserve.stages import Stage


class StageLevel:
    """Looks at memory: a plan is made where weights, activations and the handoff reserve fit."""

    def __init__(
        self, times: StageTimes, memory: MemoryCheck, options: DispatchOptions, pools: Sequence[Pool], now_s: float
    ) -> None:
        self.work = WorkTimes(times, aligned=False)
        self._times = times
        self._memory = memory
        self._now_s = now_s
        self._auxiliaries = Auxiliaries(pools, map_to_nodes(pools), memory, times, now_s)
        self._builder = AssignmentBuilder(self._auxiliaries, now_s)

    def find_candidates(self, request: PendingRequest, index: int, pool: Pool) -> list[GreedyCandidate] | str:
        route = find_route(Work.from_pending(request), pool, self._memory, self._auxiliaries)
        if isinstance(route, str):
            return route
        encode_free_s = route.free_at_s(Stage.ENCODE, request.spec.model, self._auxiliaries)
        decode_free_s = route.free_at_s(Stage.DECODE, request.spec.model, self._auxiliaries)
        return [
            GreedyCandidate(
                index,
                degree,
                route.primary,
                self._finish_s(request, degree, encode_free_s, decode_free_s),
                route.groups,
                route.fitting.apart.get(degree, frozenset()),
            )
            for degree in route.fitting.degrees
        ]

    def _finish_s(
        self, request: PendingRequest, degree: int, encode_free_s: float | None, decode_free_s: float | None
    ) -> float:
        """The time at which the request would end if it started now, with E and C on auxiliaries that are free then;
        None where the primary runs them."""
        encode_start_s = self._now_s if encode_free_s is None else encode_free_s
        diffused_s = encode_start_s + self.work.encode_s(request, degree) + self.work.diffuse_s(request, degree)
        decode_start_s = diffused_s if decode_free_s is None else max(diffused_s, decode_free_s)
        return decode_start_s + self.work.decode_s(request, degree)

    def assign(
        self, request: PendingRequest, candidate: GreedyCandidate, workers: tuple[WorkerId, ...], why: str
    ) -> Assignment:
        encode = None
        if not request.encoded:
            encode_s = self.work.encode_s(request, candidate.degree)
            encode = StageEstimate(encode_s, len(workers), candidate.groups.get(Stage.ENCODE, ()))
        leaders = self._times.unit(request.spec.model, Stage.DECODE)
        decode_s = self.work.decode_s(request, candidate.degree)
        decode = StageEstimate(decode_s, leaders, candidate.groups.get(Stage.DECODE, ()))
        diffuse_s = self.work.diffuse_s(request, candidate.degree)
        return self._builder.build(
            [request], candidate.primary, workers, encode, diffuse_s, decode, why, apart=candidate.apart
        )
