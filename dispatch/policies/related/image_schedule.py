"""The list schedule of GenServe's image batches, on any number of GPUs. All times are seconds from now."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Slack for rounding errors, in seconds.
_EPSILON_S = 1e-6


class ImageBatch(NamedTuple):
    """Images of one kind that run together."""

    degree: int
    """The GPUs that the batch needs."""
    ends_s: tuple[float, ...]
    """Seconds until each image would end if the batch started now."""
    budgets_s: tuple[float, ...]
    """Seconds until each image must end."""


class _Job(NamedTuple):
    """A batch, as far as the schedule goes."""

    degree: int
    seconds: float
    critical: Sequence[tuple[float, float]]
    """The ends and budgets of its images that are in time only if it starts early enough."""


class ImageSchedule:
    """The batches in their order, each as soon as its GPUs are free; one that needs more GPUs than there are never
    starts. A batch that does not start within a round counts as if it started at the end of it."""

    def __init__(self, batches: Sequence[ImageBatch], gpus: int, round_s: float) -> None:
        """`gpus`: the most there can be."""
        self._in_time: dict[int, int] = {}
        self._always_in_time = 0
        self._jobs: list[_Job] = []
        self._latest_s = 0.0
        """No image is in time by its batch's start after this."""
        for batch in batches:
            critical = []
            for end_s, budget_s in zip(batch.ends_s, batch.budgets_s, strict=True):
                if round_s + end_s <= budget_s:
                    self._always_in_time += 1
                elif end_s <= budget_s:
                    critical.append((end_s, budget_s))
                    self._latest_s = max(self._latest_s, budget_s - end_s + _EPSILON_S)
            self._jobs.append(_Job(batch.degree, max(batch.ends_s), critical))
        while self._jobs and not self._jobs[-1].critical:
            self._jobs.pop()
        degrees = np.array([batch.degree for batch in batches], dtype=int)
        self._most = int(degrees.sum())
        self.steps = {*degrees.tolist(), self._most}
        """The numbers of GPUs at which one more batch can start at all, and at which all start at once."""
        self.started = np.zeros(gpus + 1, dtype=int)
        """The number of batches that start at once, by the number of GPUs."""
        for fewest in sorted(self.steps):
            needed = np.cumsum(degrees[degrees <= fewest])
            self.started[fewest:] = np.searchsorted(needed, np.arange(fewest, gpus + 1), side="right")

    def count_in_time(self, gpus: int) -> int:
        """The number of images in time. Between two numbers of `steps`, more GPUs never make it smaller: the same
        batches can start, and each of them has its GPUs no later."""
        gpus = min(gpus, self._most)
        if (known := self._in_time.get(gpus)) is None:
            known = self._in_time[gpus] = self._simulate(gpus)
        return known

    def _simulate(self, gpus: int) -> int:
        jobs = [job for job in self._jobs if job.degree <= gpus]
        at_once, later = jobs[: self.started[gpus]], jobs[self.started[gpus] :]
        free_s = [job.seconds for job in at_once for _ in range(job.degree)]
        free_s += [0.0] * (gpus - len(free_s))
        heapq.heapify(free_s)
        in_time = self._always_in_time + sum([len(job.critical) for job in at_once])
        for degree, seconds, critical in later:
            if free_s[0] > self._latest_s:
                break
            for _ in range(degree - 1):
                heapq.heappop(free_s)
            start_s = free_s[0]
            heapq.heapreplace(free_s, start_s + seconds)
            for _ in range(degree - 1):
                heapq.heappush(free_s, start_s + seconds)
            for end_s, budget_s in critical:
                in_time += start_s + end_s <= budget_s
        return in_time
