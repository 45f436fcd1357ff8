"""Stage-level resource allocation: each stage has its own workers (section 8.1, B5 and B6).

D has k primaries. E and C, which gain next to nothing from more than one worker, go to the auxiliary that is free
first, or stay with D where its workers hold them (E on all of them, C on the leader alone).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from dispatch.options import DispatchOptions
from dispatch.policies.greedy.lanes import Offer
from dispatch.policies.greedy.work import WorkTimes, needs_encode
from dispatch.workers.auxiliaries import Auxiliaries, Seat
from dispatch.workers.memory_fit import Fits
from dispatch.workers.pools import Pool
from tridentserve.plans import Replica, WorkerId
from tridentserve.protocols import Assignment, PendingRequest, StageTimes
from tridentserve.stages import PlacementType, Stage


class StageLevel:
    """Looks at memory: a plan is made where weights, activations and the handoff reserve fit."""

    def __init__(
        self, times: StageTimes, fits: Fits, options: DispatchOptions, pools: Sequence[Pool], now_s: float
    ) -> None:
        self.work = WorkTimes(times, aligned=False)
        self._times = times
        self._fits = fits
        self._pools = pools
        self._now_s = now_s
        self._auxiliaries = Auxiliaries(pools, fits, times, now_s)

    @cached_property
    def _node_of(self) -> dict[WorkerId, str]:
        return {worker.worker_id: worker.node_id for pool in self._pools for node in pool.nodes for worker in node}

    def degrees(self, request: PendingRequest, pool: Pool) -> Sequence[int] | str:
        spec, kind = request.spec, pool.types[request.spec.model]
        for stage in self._elsewhere(request, kind):
            if not self._able(request, stage):
                return f"{kind} workers: no auxiliary has {stage} and the memory for it"
        here = kind.stages if needs_encode(request) else kind.stages - {Stage.ENCODE}
        fitting = self._fits.degrees(pool, spec.model, here, spec.shape, spec.num_outputs, batch=1)
        return fitting if isinstance(fitting, str) else fitting.degrees

    def finish_s(self, request: PendingRequest, primary: PlacementType, degree: int) -> float:
        free_s = {stage: self._free_at_s(request, stage) for stage in self._elsewhere(request, primary)}
        encoded_s = free_s.get(Stage.ENCODE, self._now_s) + self.work.encode_s(request, degree)
        diffused_s = encoded_s + self.work.diffuse_s(request, degree)
        return max(diffused_s, free_s.get(Stage.DECODE, diffused_s)) + self.work.decode_s(request, degree)

    def assign(self, request: PendingRequest, offer: Offer, workers: tuple[WorkerId, ...], why: str) -> Assignment:
        elsewhere, degree = self._elsewhere(request, offer.primary), offer.degree
        encode_s, decode_s = self.work.encode_s(request, degree), self.work.decode_s(request, degree)
        encode, encoded_s = workers if needs_encode(request) else (), self._now_s + encode_s
        if Stage.ENCODE in elsewhere:
            encode, encoded_s = self._take(request, Stage.ENCODE, self._now_s, encode_s, workers[0])
        diffused_s = encoded_s + self.work.diffuse_s(request, degree)
        self._auxiliaries.occupy(workers, diffused_s)
        leaders = self._times.unit(request.spec.model, Stage.DECODE)
        decode, finish_s = workers[:leaders], diffused_s + decode_s
        if Stage.DECODE in elsewhere:
            decode, finish_s = self._take(request, Stage.DECODE, diffused_s, decode_s, workers[0])
        ids = (request.spec.request_id,)
        return Assignment(ids, offer.primary, encode, workers, decode, expected_finish_s=finish_s, reason=why)

    def _elsewhere(self, request: PendingRequest, primary: PlacementType) -> tuple[Stage, ...]:
        """The stages that are left and that D's workers do not hold."""
        wanted = (Stage.ENCODE, Stage.DECODE) if needs_encode(request) else (Stage.DECODE,)
        return tuple(stage for stage in wanted if stage not in primary.stages)

    def _able(self, request: PendingRequest, stage: Stage) -> tuple[Seat, ...]:
        spec = request.spec
        return self._auxiliaries.able(spec.model, stage, spec.shape, spec.num_outputs)

    def _free_at_s(self, request: PendingRequest, stage: Stage) -> float:
        return self._auxiliaries.free_at_s(self._able(request, stage), Replica(request.spec.model, stage))

    def _take(
        self, request: PendingRequest, stage: Stage, ready_s: float, work_s: float, leader: WorkerId
    ) -> tuple[tuple[WorkerId, ...], float]:
        """The auxiliary for a stage, and when it has done it."""
        able, replica = self._able(request, stage), Replica(request.spec.model, stage)
        return self._auxiliaries.take(able, ready_s, work_s, self._node_of[leader], replica)
