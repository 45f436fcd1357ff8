"""The costs of what is left of a request, at each degree of D."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tridentserve.errors import ProfileError
from tridentserve.protocols import StageTimes
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.estimation.plan_estimates import stage_degree, stage_seconds
from tridentserve.stages import Stage

# All that requests of one kind have in common: the model, the size, the steps, the number of outputs, and the expected
# time of a step relative to one that is computed whole.
RequestKind = tuple[str, Shape, int, int, float]


def name_kind(spec: RequestSpec) -> RequestKind:
    """The kind of a request."""
    return spec.model, spec.shape, spec.num_inference_steps, spec.num_outputs, spec.step_share


@dataclass(frozen=True, slots=True)
class RequestCosts:
    """The seconds that the stages of requests of one kind are expected to take."""

    encode_s: float
    step_s: Mapping[int, float]
    """Seconds of one denoising step by degree, narrow ones first; never empty."""
    decode: Mapping[int, tuple[int, float]]
    """By the degree of D the number of workers that run C where D's workers hold it, and the seconds."""
    decode_alone_s: float
    """Seconds of C on a worker that does not hold D."""
    optimal: int
    """The widest degree that is efficient."""

    def gpu_seconds(self, degree: int, steps: float, encodes: bool) -> float:
        """Worker-seconds of this many steps at a degree, of C, and of E if it `encodes`."""
        width, decode_s = self.decode[degree]
        return degree * self.denoise_s(degree, steps, encodes) + width * decode_s

    def denoise_s(self, degree: int, steps: float, encodes: bool) -> float:
        """Seconds until D has ended."""
        return steps * self.step_s[degree] + (self.encode_s if encodes else 0.0)

    def take_s(self, degree: int, steps: float, encodes: bool) -> float:
        """Seconds until C has ended at a degree of D."""
        return self.denoise_s(degree, steps, encodes) + self.decode[degree][1]

    def alone_s(self, steps: float, encodes: bool) -> float:
        """Seconds until C has ended at the optimal degree."""
        return self.take_s(self.optimal, steps, encodes)

    def least_gpu_seconds(self, steps: float, encodes: bool) -> float:
        """Worker-seconds at the cheapest degree."""
        return min(self.gpu_seconds(degree, steps, encodes) for degree in self.step_s)


def estimate_costs(times: StageTimes, spec: RequestSpec, most: int, min_efficiency: float) -> RequestCosts:
    """The costs at degrees up to `most`. Raises `ProfileError` where no degree was profiled at this size."""
    step_s: dict[int, float] = {}
    for degree in times.degrees(spec.model, Stage.DIFFUSE):
        if degree <= most:
            try:
                step_s[degree] = stage_seconds(times, spec, Stage.DIFFUSE, degree, num_steps=1)
            except ProfileError:
                continue  # wide sizes may be profiled at wide degrees alone
    if not step_s:
        raise ProfileError(f"{spec.model} was not profiled at {spec.shape} on {most} workers or fewer")
    narrowest = next(iter(step_s))
    least_s = narrowest * step_s[narrowest]
    widest = max(times.unit(spec.model, Stage.DECODE), times.optimal_degree(spec.model, Stage.DECODE, spec.shape))
    decode: dict[int, tuple[int, float]] = {}
    for degree in step_s:
        width = stage_degree(times, spec.model, Stage.DECODE, min(widest, degree))
        decode[degree] = width, stage_seconds(times, spec, Stage.DECODE, width)
    efficient = [k for k, seconds in step_s.items() if k == narrowest or least_s >= min_efficiency * k * seconds]
    return RequestCosts(
        encode_s=stage_seconds(times, spec, Stage.ENCODE),
        step_s=step_s,
        decode=decode,
        decode_alone_s=stage_seconds(times, spec, Stage.DECODE),
        optimal=max(efficient),
    )
