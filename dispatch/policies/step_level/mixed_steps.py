"""Batches of requests that differ in size, for the step-level policies: packed steps on one worker, and on several
workers a ring for each request (DiT-Serve's Brick Attention, section 3.3.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dispatch.assignment.mixed_batches import PLAIN, RING_UNEVENNESS, WORTHWHILE
from dispatch.options import DispatchOptions
from tridentserve.errors import ProfileError
from tridentserve.protocols import StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.estimation.plan_estimates import PACKED_PEAK_FACTOR, batch_seconds, stage_seconds
from tridentserve.stages import Stage

if TYPE_CHECKING:
    from dispatch.policies.step_level.dispatcher import BatchCandidate

# The candidates by degree for so many requests like one, in a pool; `encoded`: all have their condition.
FindAlike = Callable[[RequestSpec, int, int, bool], "Mapping[int, BatchCandidate]"]


class MixedSteps:
    """One tick's candidates for batches of several sizes, where memory and the profile allow them."""

    def __init__(self, times: StageTimes, options: DispatchOptions, find_alike: FindAlike) -> None:
        self._times = times
        self._options = options
        self._find_alike = find_alike

    def can_mix(self, one: RequestSpec, other: RequestSpec, degree: int) -> bool:
        """True where two requests may share steps on so many workers although they differ in size."""
        models = self._options.pack_sizes if degree == 1 else self._options.ring_sizes
        equal = one.model == other.model and one.num_outputs == other.num_outputs
        return (
            equal and one.model in models and all(each.batch_key == PLAIN and not each.loras for each in (one, other))
        )

    def find_candidates(self, specs: Sequence[RequestSpec], pool: int, encoded: bool) -> dict[int, BatchCandidate]:
        """The candidates by degree for requests of which some differ in size. All their stages run on the workers of
        D."""
        largest = max(specs, key=lambda spec: spec.shape.tokens)
        alike = self._find_alike(largest, pool, len(specs), encoded)
        found = {}
        for degree, each in alike.items():
            stays = not (each.encode.groups or each.decode.groups or each.apart)
            if not stays or not all(self.can_mix(largest, spec, degree) for spec in specs):
                continue
            # What has the memory for so many of the largest has it for smaller ones.
            peaks = PACKED_PEAK_FACTOR * len(specs) * (1 if degree == 1 else RING_UNEVENNESS)
            if degree not in self._find_alike(largest, pool, peaks, encoded):
                continue
            try:
                step_s = batch_seconds(self._times, specs, Stage.DIFFUSE, degree, 1)
                decode_s = sum(stage_seconds(self._times, spec, Stage.DECODE) for spec in specs)
            except ProfileError:
                continue
            found[degree] = each._replace(step_s=step_s, decode=each.decode._replace(seconds=decode_s))
        return found


def is_worthwhile(together_s: float, apart_s: float) -> bool:
    """True where a step of all takes so much less time than the steps apart that requests of other sizes may join."""
    return together_s < WORTHWHILE * apart_s
