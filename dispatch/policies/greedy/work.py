"""The degrees that a request can run at, and the seconds that what is left of it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tridentserve.errors import ProfileError
from tridentserve.protocols import PendingRequest, RunningRequest, StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.estimation.plan_estimates import stage_seconds
from tridentserve.stages import Stage


def count_steps_left(request: PendingRequest | RunningRequest) -> int:
    return request.spec.num_inference_steps - request.steps_done


def make_fresh_request(spec: RequestSpec) -> PendingRequest:
    """A request of which nothing has been done."""
    return PendingRequest(spec, arrival_s=0.0, deadline_s=float("inf"))


def find_covered_degrees(times: StageTimes, spec: RequestSpec, widest: int) -> tuple[int, ...]:
    """The degrees up to `widest` at which D was profiled for this size, ascending. Empty when there is none."""

    def is_covered(degree: int) -> bool:
        try:
            times.seconds(spec.model, Stage.DIFFUSE, spec.shape, degree, spec.num_outputs)
        except ProfileError:
            return False
        return True

    return tuple(k for k in times.degrees(spec.model, Stage.DIFFUSE) if k <= widest and is_covered(k))


def choose_closest_degree(degrees: Sequence[int], target: int) -> int:
    """The widest of `degrees` (ascending, not empty) up to `target`; where all are wider, the narrowest."""
    return max((degree for degree in degrees if degree <= target), default=degrees[0])


@dataclass(frozen=True, slots=True)
class WorkTimes:
    """Seconds of the work that is left of a request."""

    times: StageTimes
    """Seconds and memory of the stages."""
    aligned: bool
    """True where E and C are given as many workers as D (pipeline-level); else they have one."""

    def encode_s(self, request: PendingRequest, degree: int) -> float:
        if request.encoded:
            return 0.0
        return stage_seconds(self.times, request.spec, Stage.ENCODE, degree if self.aligned else 1)

    def diffuse_s(self, request: PendingRequest, degree: int) -> float:
        return stage_seconds(self.times, request.spec, Stage.DIFFUSE, degree, num_steps=count_steps_left(request))

    def decode_s(self, request: PendingRequest, degree: int) -> float:
        return stage_seconds(self.times, request.spec, Stage.DECODE, degree if self.aligned else 1)

    def run_s(self, request: PendingRequest, degree: int) -> float:
        """All that is left of a request whose D has `degree` workers, without any waiting. `ProfileError` where D was
        not profiled."""
        encode_s, decode_s = self.encode_s(request, degree), self.decode_s(request, degree)
        return encode_s + self.diffuse_s(request, degree) + decode_s

    def optimal_degree(self, spec: RequestSpec) -> int:
        """The optimal degree of D (section 6.2)."""
        return self.times.optimal_degree(spec.model, Stage.DIFFUSE, spec.shape)
