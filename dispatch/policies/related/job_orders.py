"""Orders in which DiT-Serve serves requests: each has a measure, and the smallest goes first (appendix, scheduling
ablations)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from tridentserve.requests import RequestSpec


class JobMeasure(Protocol):
    """By how much a request comes after others; the least is 0."""

    def __call__(self, spec: RequestSpec, steps_left: int, arrival_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class JobOrder:
    """One way to order requests, those that wait and those that run."""

    measure: JobMeasure
    unit: str
    """The unit of the measure, as the reason of a plan tells it."""


def compute_length(spec: RequestSpec) -> float:
    """The length of a request's sequence in tokens, all of its outputs together."""
    return spec.shape.tokens * spec.num_outputs


def _measure_remaining_processing(spec: RequestSpec, steps_left: int, arrival_s: float) -> float:
    """Section 3.4: L(req) = (T_total - t) S(req)."""
    return steps_left * compute_length(spec)


def _measure_remaining_steps(spec: RequestSpec, steps_left: int, arrival_s: float) -> float:
    return steps_left


def _measure_steps(spec: RequestSpec, steps_left: int, arrival_s: float) -> float:
    return spec.num_inference_steps


def _measure_arrival(spec: RequestSpec, steps_left: int, arrival_s: float) -> float:
    return arrival_s


# By the end of the policy's name, as the paper abbreviates them.
JOB_ORDERS: Mapping[str, JobOrder] = MappingProxyType(
    {
        "srptf": JobOrder(_measure_remaining_processing, "token-steps left"),
        "srtf": JobOrder(_measure_remaining_steps, "steps left"),
        "sjf": JobOrder(_measure_steps, "steps"),
        "fcfs": JobOrder(_measure_arrival, "s, when it came"),
    }
)
