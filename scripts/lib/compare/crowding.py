"""Estimates how much the workers of a node slow each other down, from stages that ran while several computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lib.compare.samples import StagePoint, StageSample

# Samples that ran at the same time, and what each stage takes alone (per step for DIFFUSE).
Crowd = tuple[Sequence[StageSample], Mapping[StagePoint, float]]


def estimate_slowdown(crowds: Sequence[Crowd], num_workers: int, wide: bool) -> tuple[float, ...]:
    """Entry n - 1: how many times as long a stage takes while n workers compute, 1 to `num_workers`; never falling.

    The entries are of the stages on several workers (`wide`) or of those on one. A stage that took `t_n` seconds with n
    workers at work did `sum(t_n / slowdown_n)` seconds of what it takes alone: least squares over all stages, in
    seconds, so that the long stages decide. (Short ones are slowed down more, as they wait for their turn on a core.)
    Where less than two stages of mean length ran with n at work, their slowdown lies between its own and those of n - 1
    and n + 1.
    """
    rows, done_s = [], []
    for crowd, alone_s in crowds:
        for sample in crowd:
            point = sample.point
            if (point.degree > 1) == wide and point in alone_s and not _shares_a_worker(sample, crowd):
                row = _split_seconds_by_workers(sample, crowd, num_workers)
                # With its own workers alone it does what `alone_s` says: what is left was done while others computed.
                done_s.append(sample.steps * alone_s[point] - row[point.degree - 1])
                row[point.degree - 1] = 0.0
                rows.append(row)
    speeds = _fit_speeds(np.array(rows).reshape(len(rows), num_workers), np.array(done_s))
    return tuple(float(value) for value in np.maximum.accumulate(1.0 / speeds))


def _fit_speeds(times_s: NDArray[np.float64], done_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Per number of workers, the speed relative to one that computes alone. `times_s` [stages, numbers] are the seconds
    that each stage ran while others computed, `done_s` [stages] what it did in them. Drawn to
    the speeds of the numbers next to it where hardly anything was seen."""
    count = times_s.shape[1]
    if count == 1:
        return np.ones(1)
    # A pull as strong as one stage: no difference between neighbours. The first speed is 1, and not asked for.
    usual_s = float(times_s.sum()) / max(1, len(times_s)) or 1.0
    pull = usual_s * (np.eye(count - 1) - np.eye(count - 1, k=-1))
    first = usual_s * np.eye(count - 1)[0]
    found, *_ = np.linalg.lstsq(np.vstack([times_s[:, 1:], pull]), np.concatenate([done_s, first]), rcond=None)
    speeds: NDArray[np.float64] = np.clip(np.concatenate([[1.0], found]), 0.05, 1.0)
    return speeds


def _split_seconds_by_workers(sample: StageSample, crowd: Sequence[StageSample], most: int) -> list[float]:
    """The seconds that the stage ran with 1, 2, ... `most` workers at work, its own among them."""
    ends = {time for other in crowd for time in (other.start_s, other.end_s) if sample.start_s < time < sample.end_s}
    seconds = [0.0] * most
    for begin_s, end_s in pairwise(sorted({sample.start_s, sample.end_s, *ends})):
        busy = {worker for o in crowd if o.start_s < end_s and o.end_s > begin_s for worker in o.workers}
        seconds[min(len(busy), most) - 1] += end_s - begin_s
    return seconds


def _shares_a_worker(sample: StageSample, crowd: Sequence[StageSample]) -> bool:
    """True when the stage ran in one batch with another request."""
    return any(
        other is not sample
        and other.start_s < sample.end_s
        and other.end_s > sample.start_s
        and not set(other.workers).isdisjoint(sample.workers)
        for other in crowd
    )
