"""Puts an assignment together: the workers of E and C around those of D, and when each stage ends.

TridentServe, arXiv 2510.02838, section 6.2, "Solution for E and C". All dispatchers of this package use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dispatch.workers.auxiliaries import Auxiliaries, AuxiliaryGroup, TransferSeconds
from tridentserve.plans import Replica, WorkerId
from tridentserve.protocols import Assignment, PendingRequest
from tridentserve.stages import PlacementType, Stage


@dataclass(frozen=True, slots=True)
class StageEstimate:
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
            replica = Replica(model, Stage.ENCODE)
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
            replica = Replica(model, Stage.DECODE)
            decoded_on, end_s = self._auxiliaries.take(
                decode.groups, end_s, decode.seconds, near, replica, decode.transfer_s
            )
        elif decode is not None:
            decoded_on, end_s = diffuse[: decode.degree], end_s + decode.seconds
        return Assignment(
            request_ids=tuple(member.spec.request_id for member in members),
            primary=primary,
            encode=encoded_on,
            diffuse=diffuse,
            decode=decoded_on,
            expected_finish_s=end_s,
            reason=reason if isinstance(reason, str) else reason(end_s),
            num_steps=num_steps,
        )
