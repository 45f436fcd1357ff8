"""Batches of requests that differ in size and share packed steps, in which no token is padding.

Like other members of a batch they join after the solve, when it is known which requests have no group: one joins where
a step of all then takes less time than the steps apart, by the profile, and where nobody becomes late by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dispatch.assignment.mixing import count_peaks, is_worthwhile, may_mix
from dispatch.candidates.candidate import Candidate
from dispatch.candidates.classes import by_deadline
from dispatch.candidates.survey import TickView
from dispatch.candidates.work import Work
from dispatch.options import DispatchOptions
from tridentserve.errors import ProfileError
from tridentserve.protocols import PendingRequest, StageTimes
from tridentserve.requests import Shape
from tridentserve.scheduling.estimation.plan_estimates import mixed_seconds
from tridentserve.stages import Stage


class MixedBatches:
    """Adds requests of other sizes to the batches of one tick."""

    def __init__(
        self,
        times: StageTimes,
        options: DispatchOptions,
        tick: TickView,
        left: Mapping[Work, list[PendingRequest]],
    ) -> None:
        """`left`: the requests without a group. Those that join are taken out of it."""
        self._times = times
        self._limit = options.batch_limit
        self._options = options
        self._tick = tick
        self._left = left

    def extend(
        self, members: Sequence[PendingRequest], work: Work, chosen: Candidate
    ) -> tuple[list[PendingRequest], Candidate]:
        """The members of a batch with those that join, earliest deadline first, and the candidate for all of them."""
        together, shapes, candidate = list(members), [work.shape] * len(members), chosen
        if not self._can_be_mixed(work, chosen) or any(member.spec.loras for member in members):
            return together, candidate
        waiting = list(self._list_like(work))
        while waiting and len(together) < self._limit:
            # One short request more on one worker of a group makes the others wait: it pays with one for each of them.
            for count in range(1, min(len(waiting), chosen.group.degree, self._limit - len(together)) + 1):
                joining = waiting[:count]
                found = self._fit(shapes, [other.shape for _, other in joining], work, candidate)
                if found is not None and all(
                    self._may_join(request, other, together, candidate, found) for request, other in joining
                ):
                    break
            else:
                del waiting[0]
                continue
            del waiting[:count]
            candidate = found
            for request, other in joining:
                together.append(request)
                shapes.append(other.shape)
                self._left[other].remove(request)
        return together, candidate

    def _can_be_mixed(self, work: Work, chosen: Candidate) -> bool:
        """Workers that do packed steps hold all stages."""
        return _stays(chosen) and may_mix(self._options, work.model, work.batch_key, chosen.group.degree)

    def _list_like(self, work: Work) -> Iterator[tuple[PendingRequest, Work]]:
        """The requests that differ from some work in their size alone, or in their priority too."""
        like = [
            (request, other)
            for other, requests in self._left.items()
            if other.shape != work.shape and other._replace(shape=work.shape, weight=work.weight) == work
            for request in requests
            if not request.spec.loras
        ]
        yield from sorted(like, key=lambda pair: by_deadline(pair[0]))

    def _fit(
        self, present: Sequence[Shape], joining: Sequence[Shape], work: Work, before: Candidate
    ) -> Candidate | None:
        """The group of `before`, for outputs of the shapes `present`, with those that are to join; None where the
        memory does not allow it, or where it does not pay."""
        shapes = [*present, *joining]
        largest, degree = max(shapes, key=lambda shape: shape.tokens), before.group.degree
        found = self._find(work._replace(shape=largest, batch=len(shapes)), before)
        peaks = count_peaks(len(shapes), degree)
        if found is None or self._find(work._replace(shape=largest, batch=peaks), before) is None:
            return None
        try:
            members = [(shape, work.num_outputs) for shape in shapes]
            step_s = mixed_seconds(self._times, work.model, Stage.DIFFUSE, degree, members)
            joining_s = sum(
                self._times.seconds(work.model, Stage.DIFFUSE, shape, degree, work.num_outputs) for shape in joining
            )
            decode_s = sum(
                work._replace(shape=shape).stage_s(self._times, Stage.DECODE, found.decode_degree) for shape in shapes
            )
        except ProfileError:
            return None
        apart_s = before.diffuse_s + work.num_steps * joining_s
        diffuse_s = work.num_steps * step_s
        if not is_worthwhile(diffuse_s, apart_s):
            return None
        return found._replace(diffuse_s=diffuse_s, decode_s=decode_s)

    def _find(self, work: Work, before: Candidate) -> Candidate | None:
        """The candidate for some work in the group of `before`, with all stages there."""
        candidates = self._tick.survey(work).candidates
        return next((each for each in candidates if each.group == before.group and _stays(each)), None)

    def _may_join(
        self,
        request: PendingRequest,
        other: Work,
        members: Sequence[PendingRequest],
        before: Candidate,
        found: Candidate,
    ) -> bool:
        """True where no request that would be in time becomes late: all are in time together, or none could be."""
        now_s = self._tick.now_s
        earliest_s = min(member.deadline_s for member in members)
        if before.finish_s(now_s) <= earliest_s:
            return found.finish_s(now_s) <= min(earliest_s, request.deadline_s)
        return self._tick.appraise(other).best_finish_s > request.deadline_s


def _stays(candidate: Candidate) -> bool:
    """True where the workers of D run all stages in one plan."""
    there = candidate.encodes_there and candidate.decodes_there
    return there and not candidate.apart and not candidate.in_tiles
