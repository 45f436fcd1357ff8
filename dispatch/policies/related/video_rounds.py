"""GenServe's three-stage dynamic program, free of workers (arXiv 2604.04335, section 4.4 and Algorithm 1).

Stage 1 scores what each video could do in the next round and what images achieve with g GPUs; stage 2 is a knapsack
over the videos; stage 3 combines both. All times are seconds from now.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dispatch.policies.related.group_knapsack import GroupKnapsack
from dispatch.policies.related.image_schedule import ImageBatch, ImageSchedule

# One request that stays in time outweighs all preferences.
_IN_TIME = 1e6
# Worth of an image batch that starts at once, and of a video that continues as it is, in units of a relaxed video at
# its fastest degree. Without the second, two videos of nearly equal slack would displace each other in turn.
_IMAGE_STARTS = 2.0
_STAYS_AS_IT_IS = 0.25


class Video(NamedTuple):
    """A video that waits or runs, as the next round sees it."""

    steps_left: int
    """Denoising steps that are still to do."""
    step_s: Mapping[int, float]
    """Seconds per step at each degree that it could have next."""
    fastest_s: float
    """Seconds per step at its fastest degree."""
    budget_s: float
    """Seconds until its D must have ended."""
    encode_s: float = 0.0
    """Seconds of E; 0 where E is done."""
    degree: int = 0
    """The degree at which it runs now; 0 for a video that waits."""

    @property
    def slack_s(self) -> float:
        """D - now - remaining steps x seconds per step, at its fastest: high means safe to pause."""
        return self.budget_s - self.encode_s - self.steps_left * self.fastest_s

    def laxity_s(self, degree: int, round_s: float) -> float:
        """Seconds to spare after a round at `degree` (0: paused), when the rest runs at the fastest degree."""
        steps = max(0.0, round_s - self.encode_s) / self.step_s[degree] if degree else 0.0
        if steps >= self.steps_left > 0:
            return self.budget_s - self.encode_s - self.steps_left * self.step_s[degree]
        encode_s = 0.0 if degree else self.encode_s
        return self.budget_s - max(round_s, self.encode_s) - encode_s - (self.steps_left - steps) * self.fastest_s


class RoundPlan(NamedTuple):
    """The degree of each video in the round (0: it waits or is paused), and how many GPUs are for images."""

    degrees: tuple[int, ...]
    image_gpus: int


def score_degrees(video: Video, round_s: float) -> list[tuple[int, float]]:
    """The worth of each degree for a video, 0 first: that it is recoverable after the round counts most, then its speed
    (more for a video with little slack, so that the one with the highest slack is paused first), less the price of a
    switch."""
    slack_s = video.slack_s
    alone_s = max(video.steps_left * video.fastest_s, 1e-9)
    urgency = 1.0 / (1.0 + slack_s / alone_s) if slack_s >= 0 else 0.0
    scores: list[tuple[int, float]] = []
    for degree in (0, *sorted(video.step_s)):
        score = _IN_TIME if video.laxity_s(degree, round_s) >= 0 else 0.0
        if degree:
            score += video.fastest_s / video.step_s[degree] * (1.0 + urgency)
            score += _STAYS_AS_IT_IS if video.degree == degree else 0.0
        scores.append((degree, score))
    return scores


def plan_round(videos: Sequence[Video], batches: Sequence[ImageBatch], gpus: int, round_s: float) -> RoundPlan:
    """The best split of `gpus` for the next round."""
    scores = [score_degrees(video, round_s) for video in videos]
    knapsack = GroupKnapsack(scores, gpus)
    width = choose_width(knapsack.totals, ImageSchedule(batches, gpus, round_s))
    picked = knapsack.list_choices(width)
    return RoundPlan(
        degrees=tuple(options[index][0] for options, index in zip(scores, picked, strict=True)),
        image_gpus=min(gpus - width, sum(batch.degree for batch in batches)),
    )


def choose_width(videos: Sequence[float], images: ImageSchedule) -> int:
    """The GPUs for videos, the fewest of those with the largest worth of videos and images together. `videos`: the
    worth of videos by their GPUs.

    For images it counts most how many stay in time, then how many batches start at once. The first takes a simulation
    for each number of GPUs, so this is a search by branch and bound: in a range of widths, the narrowest leaves the
    most images in time.
    """
    gpus = len(videos) - 1
    worth, at_once = np.array(videos), _IMAGE_STARTS * images.started[::-1]

    def find_bound(low: int, high: int) -> tuple[float, int, int, int]:
        """The widths from `low` up to `high`, by the best that they could be."""
        totals = worth[low:high] + (_IN_TIME * images.count_in_time(gpus - low) + at_once[low:high])
        best = int(totals.argmax())
        return -float(totals[best]), low + best, low, high

    # Within each of these ranges, fewer GPUs for images never leave more of them in time.
    firsts = sorted({0, *(gpus - step + 1 for step in images.steps if 0 < step <= gpus)})
    ranges: list[tuple[float, int, int, int]] = []
    for first, end in pairwise([*firsts, gpus + 1]):
        ranges += [find_bound(low, high) for low, high in ((first, end - 1), (end - 1, end)) if low < high]
    heapq.heapify(ranges)
    while True:
        _, width, low, high = heapq.heappop(ranges)
        if high - low == 1 or images.count_in_time(gpus - low) == images.count_in_time(gpus - high):
            return width
        middle = (low + high) // 2
        heapq.heappush(ranges, find_bound(low, middle))
        heapq.heappush(ranges, find_bound(middle, high))
