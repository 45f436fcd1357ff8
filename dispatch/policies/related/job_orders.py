"""Orders in which DiT-Serve serves requests: each has a measure, and the smallest goes first (appendix, scheduling
ablations)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tridentserve.protocols import PendingRequest, RunningRequest
from tridentserve.requests import RequestSpec

OrderedJob = PendingRequest | RunningRequest
"""A request that waits or runs."""


@dataclass(frozen=True, slots=True)
class JobOrder:
    """One way to order requests, those that wait and those that run."""

    measure: Callable[[OrderedJob], float]
    """By how much a request comes after others."""
    unit: str
    """The unit of the measure, as the reason of a plan tells it."""


def compute_length(spec: RequestSpec) -> float:
    """The length of a request's sequence in tokens, all of its outputs together."""
    return spec.shape.tokens * spec.num_outputs


def _count_steps_left(job: OrderedJob) -> int:
    return job.spec.num_inference_steps - job.steps_done


def _measure_processing_left(job: OrderedJob) -> float:
    """Section 3.4: L(req) = (T_total - t) S(req)."""
    return _count_steps_left(job) * compute_length(job.spec)


# By the end of the policy's name, as the paper abbreviates them.
JOB_ORDERS: Mapping[str, JobOrder] = MappingProxyType(
    {
        "srptf": JobOrder(_measure_processing_left, "token-steps left"),
        "srtf": JobOrder(_count_steps_left, "steps left"),
        "sjf": JobOrder(lambda job: job.spec.num_inference_steps, "steps"),
        "fcfs": JobOrder(lambda job: job.arrival_s, "s, when it came"),
    }
)
