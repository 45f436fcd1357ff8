"""GenServe's three-stage dynamic program, free of workers (arXiv 2604.04335, section 4.4 and Algorithm 1).

Stage 1 scores what each video could do in the next round and what images achieve with g GPUs; stage 2 is a knapsack
over the videos; stage 3 combines both. All times are seconds from now.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dispatch.policies.related.group_knapsack import GroupKnapsack

# One request that stays in time outweighs all preferences.
_IN_TIME = 1e6
# Worth of an image batch that starts at once, and of a video that continues as it is, in units of a relaxed video at
# its fastest degree. Without the second, two videos of nearly equal slack would displace each other in turn.
_IMAGE_STARTS = 2.0
_STAYS_AS_IT_IS = 0.25


@dataclass(frozen=True, slots=True)
class Video:
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


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """Images of one kind that run together."""

    degree: int
    """The GPUs that the batch needs."""
    ends_s: tuple[float, ...]
    """Seconds until each image would end if the batch started now."""
    budgets_s: tuple[float, ...]
    """Seconds until each image must end."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The degree of each video in the round (0: it waits or is paused), and how many GPUs are for images."""

    degrees: tuple[int, ...]
    image_gpus: int


def score_video(video: Video, degree: int, round_s: float) -> float:
    """The worth of a degree for a video: that it is recoverable after the round counts most, then its speed (more for a
    video with little slack, so that the one with the highest slack is paused first), less the price of a switch."""
    score = _IN_TIME if video.laxity_s(degree, round_s) >= 0 else 0.0
    if degree:
        alone_s = max(video.steps_left * video.fastest_s, 1e-9)
        urgency = 1.0 / (1.0 + video.slack_s / alone_s) if video.slack_s >= 0 else 0.0
        score += video.fastest_s / video.step_s[degree] * (1.0 + urgency)
        score += _STAYS_AS_IT_IS if video.degree == degree else 0.0
    return score


def score_images(batches: Sequence[ImageBatch], gpus: int, round_s: float) -> float:
    """The worth of this number of GPUs for images: the images that stay in time count most, in the list schedule of the
    batches in their order or when their batch starts a round later; then the batches that start at once."""
    free_s, score = [0.0] * gpus, 0.0
    for batch in batches:
        start_s = float("inf")
        if batch.degree <= gpus:
            start_s = max(heapq.heappop(free_s) for _ in range(batch.degree))
            for _ in range(batch.degree):
                heapq.heappush(free_s, start_s + max(batch.ends_s))
        start_by_s = min(start_s, round_s)
        in_time = sum(start_by_s + end <= budget for end, budget in zip(batch.ends_s, batch.budgets_s, strict=True))
        score += in_time * _IN_TIME + (_IMAGE_STARTS if start_s == 0 else 0.0)
    return score


def plan_round(videos: Sequence[Video], batches: Sequence[ImageBatch], gpus: int, round_s: float) -> RoundPlan:
    """The best split of `gpus` for the next round."""
    options = [(0, *sorted(video.step_s)) for video in videos]
    scored = [
        [(degree, score_video(video, degree, round_s)) for degree in degrees]
        for video, degrees in zip(videos, options, strict=True)
    ]
    knapsack = GroupKnapsack(scored, gpus)
    most = min(gpus, sum(batch.degree for batch in batches))
    images = [score_images(batches, g, round_s) for g in range(most + 1)]
    totals = [total + images[min(gpus - width, most)] for width, total in enumerate(knapsack.totals)]
    width = totals.index(max(totals))
    picked = knapsack.list_choices(width)
    return RoundPlan(
        degrees=tuple(degrees[index] for degrees, index in zip(options, picked, strict=True)),
        image_gpus=min(gpus - width, most),
    )
