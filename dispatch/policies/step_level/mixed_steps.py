"""Batches of requests that differ in size, for the step-level policies: packed steps on one worker, and on several
workers a ring for each request (DiT-Serve's Brick Attention, section 3.3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dispatch.assignment.mixing import count_peaks, is_worthwhile, may_mix
from dispatch.options import DispatchOptions
from dispatch.policies.greedy.work import count_steps_left
from tridentserve.errors import ProfileError
from tridentserve.protocols import PendingRequest, StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.estimation.plan_estimates import batch_seconds, stage_seconds
from tridentserve.stages import Stage

if TYPE_CHECKING:
    from dispatch.policies.step_level.dispatcher import BatchCandidate, StepTick


class MixedSteps:
    """One tick's candidates for batches of several sizes, where memory and the profile allow them."""

    def __init__(self, tick: StepTick, times: StageTimes, options: DispatchOptions) -> None:
        self._tick = tick
        self._times = times
        self._options = options

    def can_mix(self, one: RequestSpec, other: RequestSpec, degree: int) -> bool:
        """True where two requests may share steps on so many workers although they differ in size."""
        equal = one.model == other.model and one.num_outputs == other.num_outputs
        plain = (may_mix(self._options, each.model, each.batch_key, degree) and not each.loras for each in (one, other))
        return equal and all(plain)

    def find_candidates(self, specs: Sequence[RequestSpec], pool: int, encoded: bool) -> dict[int, BatchCandidate]:
        """The candidates by degree for requests of which some differ in size. All their stages run on the workers of
        D."""
        largest = max(specs, key=lambda spec: spec.shape.tokens)
        alike = self._tick.find_candidates(largest, pool, len(specs), encoded)
        found = {}
        for degree, each in alike.items():
            stays = not (each.encode.groups or each.decode.groups or each.apart)
            if not stays or not all(self.can_mix(largest, spec, degree) for spec in specs):
                continue
            if degree not in self._tick.find_candidates(largest, pool, count_peaks(len(specs), degree), encoded):
                continue
            try:
                step_s = batch_seconds(self._times, specs, Stage.DIFFUSE, degree, 1)
                decode_s = sum(stage_seconds(self._times, spec, Stage.DECODE) for spec in specs)
            except ProfileError:
                continue
            found[degree] = each._replace(step_s=step_s, decode=each.decode._replace(seconds=decode_s))
        return found

    def mix(
        self, members: list[PendingRequest], others: Iterable[PendingRequest], pool: int, degree: int, strict: bool
    ) -> None:
        """Let others of other sizes join in their order, where that pays, up to the largest batch. `strict`: as in
        `StepTick.grow`."""
        if not count_steps_left(members[0]):
            return
        first = members[0].spec
        waiting = [
            each
            for each in others
            if count_steps_left(each)
            and self._tick.kinds[each.spec.request_id] != self._tick.kinds[first.request_id]
            and self.can_mix(first, each.spec, degree)
        ]

        def delays_nobody(joining: Sequence[PendingRequest]) -> bool:
            together = [*members, *joining]
            candidate = self._tick.find_batch_candidates(together, pool).get(degree)
            return candidate is not None and (not strict or self._tick.delays_nobody(together, candidate, pool))

        while waiting:
            joining = self.find_joining([each.spec for each in members], waiting, pool, degree, delays_nobody)
            members += joining
            del waiting[: max(1, len(joining))]

    def find_joining(
        self,
        present: Sequence[RequestSpec],
        waiting: Sequence[PendingRequest],
        pool: int,
        degree: int,
        may_join: Callable[[Sequence[PendingRequest]], bool] = lambda joining: True,
    ) -> Sequence[PendingRequest]:
        """The first of those that wait, which may be of other sizes, as few as make it pay that they share the steps of
        those that are present; empty where it does not. One short request more on one worker of a group makes the
        others wait: it pays with one for each of them."""
        for count in range(1, min(len(waiting), degree, self._tick.max_batch - len(present)) + 1):
            joining = waiting[:count]
            if self._gains_from_mixing(present, [each.spec for each in joining], pool, degree) and may_join(joining):
                return joining
        return ()

    def _gains_from_mixing(
        self, present: Sequence[RequestSpec], joining: Sequence[RequestSpec], pool: int, degree: int
    ) -> bool:
        """True where a step with those that join takes less time than the steps apart."""
        parts = (present, *([spec] for spec in joining))
        apart = [self._tick.find_candidates_together(part, pool, True).get(degree) for part in parts]
        together = self._tick.find_candidates_together([*present, *joining], pool, True).get(degree)
        if together is None:
            return False
        return all(apart) and is_worthwhile(together.step_s, sum(each.step_s for each in apart if each is not None))
