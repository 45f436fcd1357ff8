"""The schedule of images and the split of the GPUs against a plain simulation of all splits."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dispatch.policies.related.image_schedule import ImageBatch, ImageSchedule
from dispatch.policies.related.video_rounds import choose_width

GPUS = 9


@st.composite
def image_batches(draw: st.DrawFn) -> ImageBatch:
    ends_s = draw(st.lists(st.floats(0.1, 4.0), min_size=1, max_size=3))
    budgets_s = [end_s + draw(st.floats(-1.0, 9.0)) for end_s in ends_s]
    return ImageBatch(draw(st.sampled_from([1, 1, 1, 2, 4])), tuple(ends_s), tuple(budgets_s))


def simulate(batches: Sequence[ImageBatch], gpus: int, round_s: float) -> tuple[int, int]:
    """The images in time, and the batches that start at once."""
    free_s, in_time, started = [0.0] * gpus, 0, 0
    for batch in batches:
        start_s = float("inf")
        if batch.degree <= gpus:
            start_s = sorted(free_s)[batch.degree - 1]
            free_s = sorted(free_s)[batch.degree :] + [start_s + max(batch.ends_s)] * batch.degree
        start_by_s = min(start_s, round_s)
        in_time += sum(start_by_s + end <= budget for end, budget in zip(batch.ends_s, batch.budgets_s, strict=True))
        started += start_s == 0
    return in_time, started


@given(batches=st.lists(image_batches(), max_size=14), round_s=st.floats(0.0, 6.0))
def test_the_images_in_time_and_the_batches_at_once_are_those_of_a_simulation(
    batches: list[ImageBatch], round_s: float
) -> None:
    schedule = ImageSchedule(batches, GPUS, round_s)
    for gpus in range(GPUS + 1):
        assert (schedule.count_in_time(gpus), schedule.started[gpus]) == simulate(batches, gpus, round_s)


@given(
    batches=st.lists(image_batches(), max_size=14),
    round_s=st.floats(0.0, 6.0),
    videos=st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 3)), min_size=GPUS + 1, max_size=GPUS + 1),
)
def test_the_split_is_the_first_of_the_best(
    batches: list[ImageBatch], round_s: float, videos: list[tuple[int, int]]
) -> None:
    # Whole numbers of videos in time and of preferences make ties; -1: the width cannot be used exactly.
    worth = [1e6 * in_time + rest if in_time >= 0 else float("-inf") for in_time, rest in videos]
    worth[0] = 0.0
    totals = []
    for width, total in enumerate(worth):
        in_time, started = simulate(batches, GPUS - width, round_s)
        totals.append(total + (1e6 * in_time + 2.0 * started))
    assert choose_width(worth, ImageSchedule(batches, GPUS, round_s)) == totals.index(max(totals))
