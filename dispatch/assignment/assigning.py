"""Turns chosen groups into assignments: concrete primaries, the members of batches, auxiliaries for E and C.

All dispatchers of this package put their assignments together with `AssignmentBuilder`: the workers of E and C around
those of D, and the time at which each stage ends (TridentServe, arXiv 2510.02838, section 6.2, "Solution for E and C").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from dispatch.assignment.batching import Batches, form_batch
from dispatch.assignment.mixed_batches import MixedBatches
from dispatch.candidates.candidate import Candidate
from dispatch.candidates.classes import by_deadline
from dispatch.candidates.survey import TickView
from dispatch.candidates.work import Waiting, Work
from dispatch.options import NO_BATCHES, DispatchOptions
from dispatch.workers.auxiliaries import Auxiliaries, AuxiliaryGroup, TransferSeconds, name_replica
from dispatch.workers.idle_workers import IdleWorkers
from tridentserve.plans import WorkerId
from tridentserve.protocols import Assignment, PendingRequest, StageTimes
from tridentserve.stages import PlacementType, Stage

# What is left of D is one segment where it is no longer than this many.
_LAST_SEGMENTS = 1.5


class StageEstimate(NamedTuple):
    """The expected time and width of E or C in an assignment."""

    seconds: float
    """Seconds that the stage runs."""
    degree: int = 1
    """Number of D's workers that run it, where the primary holds it."""
    groups: tuple[AuxiliaryGroup, ...] = ()
    """The auxiliaries that can run it, where the primary does not; the one that is free first does."""
    transfer_s: TransferSeconds = (0.0, 0.0)
    """Seconds to move the condition from E's auxiliary, or the latents to C's: within a node, and between nodes."""


class AssignmentBuilder:
    """Builds the assignments of one tick. Auxiliaries that one assignment uses are busy for the next."""

    def __init__(self, auxiliaries: Auxiliaries, now_s: float) -> None:
        self._auxiliaries = auxiliaries
        self._now_s = now_s

    def build(
        self,
        members: Sequence[PendingRequest],
        primary: PlacementType,
        diffuse: tuple[WorkerId, ...],
        encode: StageEstimate | None,
        diffuse_s: float,
        decode: StageEstimate | None,
        reason: str | Callable[[float], str],
        num_steps: int | None = None,
        fetch_s: tuple[float, float] = (0.0, 0.0),
        occupies: bool = True,
        apart: frozenset[Stage] = frozenset(),
    ) -> Assignment:
        """The assignment of these requests to D's workers `diffuse`. `encode` is None when all members have their
        condition, `decode` when D stops before its last step (after `num_steps`). `reason` may be a function of the
        time at which the assignment is expected to end. `fetch_s`: seconds to bring the state of a stopped request, and
        to load weights, before D begins. `occupies`: D's workers count as busy afterwards."""
        model, near = members[0].spec.model, self._auxiliaries.node_of[diffuse[0]]
        encoded_on: tuple[WorkerId, ...] = ()
        decoded_on: tuple[WorkerId, ...] = ()
        end_s = self._now_s
        if encode is not None and encode.groups:
            replica = name_replica(model, Stage.ENCODE)
            encoded_on, end_s = self._auxiliaries.take(encode.groups, end_s, encode.seconds, near, replica)
            end_s += encode.transfer_s[0 if self._auxiliaries.node_of[encoded_on[0]] == near else 1]
        elif encode is not None:
            encoded_on, end_s = diffuse[: encode.degree], end_s + encode.seconds
        for seconds in fetch_s:
            end_s += seconds
        end_s += diffuse_s
        if occupies:
            self._auxiliaries.occupy(diffuse, end_s)
        if decode is not None and decode.groups:
            replica = name_replica(model, Stage.DECODE)
            decoded_on, end_s = self._auxiliaries.take(
                decode.groups, end_s, decode.seconds, near, replica, decode.transfer_s
            )
        elif decode is not None:
            decoded_on, end_s = diffuse[: decode.degree], end_s + decode.seconds
        return Assignment(
            request_ids=tuple([member.spec.request_id for member in members]),
            primary=primary,
            encode=encoded_on,
            diffuse=diffuse,
            decode=decoded_on,
            expected_finish_s=end_s,
            reason=reason if isinstance(reason, str) else reason(end_s),
            num_steps=num_steps,
            apart=apart,
        )


class Choice(NamedTuple):
    """A request with the group that the solution gives it."""

    pending: PendingRequest
    work: Work
    candidate: Candidate


class _Segment(NamedTuple):
    """The part of D that a choice runs now."""

    seconds: float
    num_steps: int | None
    """None: all that is left."""


class Assigner:
    """Makes the assignments of one tick."""

    def __init__(
        self,
        times: StageTimes,
        options: DispatchOptions,
        tick: TickView,
        waiting: Waiting,
        batches: Batches,
        segment_s: float,
    ) -> None:
        """`batches`: those that were formed before the solve. `segment_s`: seconds of D until it is decided anew who
        gets the workers."""
        self._batches = batches
        self._times = times
        self._options = options
        self._segment_s = segment_s
        self._segments: dict[tuple[float, int], _Segment] = {}
        self._tick = tick
        self._waiting = waiting
        self._now_s = tick.now_s
        self._auxiliaries = tick.auxiliaries
        self._builder = AssignmentBuilder(tick.auxiliaries, tick.now_s)

    def assign(self, choices: Sequence[Choice], found_by: str) -> list[Assignment]:
        """Primaries for the widest first, of equals for those with LoRAs, then batches and auxiliaries for the earliest
        deadline first, in which order the assignments are. `found_by` ends their reasons."""
        taken: dict[str, tuple[WorkerId, ...]] = {}
        idle: dict[int, IdleWorkers] = {}
        in_order = sorted(choices, key=lambda choice: by_deadline(choice.pending))
        for choice in sorted(in_order, key=_order_for_workers):
            group = choice.candidate.group
            if group.pool not in idle:
                idle[group.pool] = IdleWorkers(self._tick.pools[group.pool])
            liked = self._find_holders(choice.pending, idle[group.pool])
            workers = idle[group.pool].take(group.degree, _find_preferred(choice, idle[group.pool]), liked)
            if workers is not None:
                taken[choice.pending.spec.request_id] = workers
                if not self._auxiliaries.are_any:
                    continue
                unused_s = choice.candidate.diffuse_s - self._cut_segment(choice.candidate, choice.work).seconds
                self._auxiliaries.occupy(workers, choice.candidate.diffuse_end_s(self._now_s) - unused_s)
        left = self._list_left(taken)
        mixed = MixedBatches(self._times, self._options, self._tick, left)
        assignments: list[Assignment] = []
        for choice in in_order:
            if (workers := taken.get(choice.pending.spec.request_id)) is not None:
                members, candidate = self._form_batch(choice, left.get(choice.work, []) if left else [])
                members, candidate = mixed.extend(members, choice.work, candidate)
                assignments.append(self._build_assignment(members, choice.work, candidate, workers, found_by))
        return assignments

    def _find_holders(self, pending: PendingRequest, idle: IdleWorkers) -> frozenset[WorkerId]:
        """Workers that hold the LoRAs of a request, and of those that are known to be in its batch."""
        members = self._batches.get(pending.spec.request_id) if self._batches else None
        if members is None:
            return idle.find_holders(pending.spec.loras)
        return idle.find_holders(dict.fromkeys(key for member in members for key in member.spec.loras))

    def _list_left(self, taken: Iterable[str]) -> dict[Work, list[PendingRequest]]:
        """The requests without a group, which may join others."""
        if self._options.batch_limit == NO_BATCHES or self._batches:
            return {}
        served = set(taken)
        return {
            work: [request for request in requests if request.spec.request_id not in served]
            for work, requests in self._waiting.items()
        }

    def _form_batch(self, choice: Choice, left: list[PendingRequest]) -> tuple[list[PendingRequest], Candidate]:
        """The members of the choice's batch, which are taken out of `left`, and the candidate for all of them."""
        work, group = choice.work, choice.candidate.group
        if not left:
            return list(self._batches.get(choice.pending.spec.request_id, [choice.pending])), choice.candidate
        optimal = self._times.optimal_batch(work.model, Stage.DIFFUSE, work.shape, group.degree)
        members = form_batch(
            choice.pending,
            left,
            min(self._options.batch_limit, optimal // work.num_outputs),
            lambda batch: self._fit_batch(work, choice.candidate, batch),
            self._tick.appraise(work).best_finish_s,
            self._now_s,
        )
        if len(members) == 1:
            return members, choice.candidate
        joined = {member.spec.request_id for member in members}
        left[:] = [request for request in left if request.spec.request_id not in joined]
        candidate = self._fit_batch(work, choice.candidate, len(members))
        return members, candidate or choice.candidate

    def _fit_batch(self, work: Work, chosen: Candidate, batch: int) -> Candidate | None:
        """The chosen group for a batch, with the queues at the auxiliaries as this tick has made them so far."""
        together = work._replace(batch=batch)
        for candidate in self._tick.survey(together).candidates:
            if candidate.group == chosen.group:
                if not candidate.encodes_there:
                    candidate = candidate._replace(encode_free_s=self._free_at_s(together, Stage.ENCODE))
                if not candidate.decodes_there:
                    candidate = candidate._replace(decode_free_s=self._free_at_s(together, Stage.DECODE))
                return candidate
        return None

    def _free_at_s(self, work: Work, stage: Stage) -> float:
        return self._auxiliaries.free_at_s(self._find_groups(work, stage), name_replica(work.model, stage))

    def _find_groups(self, work: Work, stage: Stage) -> tuple[AuxiliaryGroup, ...]:
        return self._auxiliaries.find_best(work.model, stage, work.shape, work.count_outputs_at_once(stage))

    def _build_assignment(
        self,
        members: Sequence[PendingRequest],
        work: Work,
        candidate: Candidate,
        diffuse: tuple[WorkerId, ...],
        found_by: str,
    ) -> Assignment:
        together = work if len(members) == work.batch else work._replace(batch=len(members))
        encode = None
        if work.needs_encode:
            encode = StageEstimate(candidate.encode_s, len(diffuse))
            if not candidate.encodes_there:
                encode = self._estimate_elsewhere(together, Stage.ENCODE, candidate.condition_s)
        diffuse_s, num_steps = self._cut_segment(candidate, together)
        decode = None
        if num_steps is None:
            decode = StageEstimate(candidate.decode_s, candidate.decode_degree)
            if not candidate.decodes_there:
                decode = self._estimate_elsewhere(together, Stage.DECODE, candidate.latents_s)
        # What was expected when the group was chosen: `end_s` is that of a segment, or after all C's that wait.
        ends_there = num_steps is None and candidate.decodes_there
        return self._builder.build(
            members,
            candidate.primary,
            diffuse,
            encode,
            diffuse_s,
            decode,
            lambda end_s: _explain(
                members, candidate, end_s if ends_there else candidate.finish_s(self._now_s), found_by
            ),
            num_steps,
            fetch_s=(
                0.0 if work.needs_encode else self._estimate_fetch_s(members[0], together, diffuse),
                candidate.load_s,
            ),
            occupies=False,  # that was done for all choices at once
            apart=candidate.apart,
        )

    def _cut_segment(self, candidate: Candidate, work: Work) -> _Segment:
        if work.whole:
            return _Segment(candidate.diffuse_s, None)
        key = (candidate.diffuse_s, work.num_steps)
        if (segment := self._segments.get(key)) is None:
            step_s = candidate.diffuse_s / max(1, work.num_steps)
            steps = count_segment_steps(work.num_steps, step_s, self._segment_s)
            whole = steps == work.num_steps
            segment = _Segment(candidate.diffuse_s if whole else steps * step_s, None if whole else steps)
            self._segments[key] = segment
        return segment

    def _estimate_elsewhere(self, work: Work, stage: Stage, transfer_s: TransferSeconds) -> StageEstimate:
        """E or C on auxiliaries."""
        groups = self._find_groups(work, stage)
        seconds = work.stage_s(self._times, stage, len(groups[0]))
        return StageEstimate(seconds, groups=groups, transfer_s=transfer_s)

    def _estimate_fetch_s(self, request: PendingRequest, work: Work, diffuse: Sequence[WorkerId]) -> float:
        """Seconds to bring the state of a stopped request from the worker that keeps it."""
        held_by = request.held_by
        if held_by is None or held_by in diffuse:
            return 0.0
        node_of = self._auxiliaries.node_of
        same_node = node_of.get(held_by) == node_of[diffuse[0]]
        return self._times.transfer_seconds(work.model, Stage.DIFFUSE, work.shape, work.num_outputs, same_node)


def count_segment_steps(steps_left: int, step_s: float, segment_s: float) -> int:
    """The steps of a request's next segment: about `segment_s` seconds, at least one where any are left."""
    if steps_left * step_s <= segment_s:
        return steps_left
    steps = max(1, round(segment_s / step_s))
    return steps_left if steps_left <= _LAST_SEGMENTS * steps else steps


def _explain(members: Sequence[PendingRequest], candidate: Candidate, finish_s: float, found_by: str) -> str:
    slack_s = min([member.deadline_s for member in members]) - finish_s
    verdict = f"{slack_s:.2f} s to spare" if slack_s >= 0 else f"late by {-slack_s:.2f} s"
    batch = f", batch of {len(members)}" if len(members) > 1 else ""
    return f"{candidate.primary} degree {candidate.group.degree}{batch}, {verdict}, {found_by}"


def _order_for_workers(choice: Choice) -> tuple[int, bool]:
    """Who has no LoRAs leaves the workers that hold some to others."""
    return -choice.candidate.group.degree, not choice.pending.spec.loras


def _find_preferred(choice: Choice, idle: IdleWorkers) -> frozenset[WorkerId]:
    """Workers that have the weights in memory, where not all have, and the one that keeps the request's state."""
    resident = idle.find_resident(choice.work.model, choice.candidate.primary.stages)
    held_by = choice.pending.held_by
    # The same object wherever it can be: the nodes of these workers are looked up once for each.
    return resident if held_by is None or held_by in resident else resident | {held_by}
