"""The length by which the seconds of a stage grow: how much a frame costs beside the first is read from the rows."""

from __future__ import annotations

import pytest

from profiler import CostModel, ProfileRow, ProfileTable, WeightsRow
from profiler.tables.curves import TokenCurve
from profiler.tables.lengths import StageLength, fit_length, fit_peak_length, make_size_curve
from tridentserve.requests import Shape
from tridentserve.stages import Stage

SIZES = [Shape(64, 64), Shape(80, 80, 5), Shape(64, 64, 17), Shape(96, 96, 17)]


def make_row(shape: Shape, seconds: float, stage: Stage = Stage.DECODE, peak_bytes: int = 1) -> ProfileRow:
    return ProfileRow("m", "cpu", stage, shape, 1, 1, seconds, peak_bytes, "measured: here")


def cost(shape: Shape, share: float, once_s: float = 0.0) -> float:
    return once_s + 1e-5 * shape.pixels * (1 + share * (shape.num_frames - 1))


@pytest.mark.parametrize("stage", [Stage.ENCODE, Stage.DECODE])
@pytest.mark.parametrize("share", [0.125, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("once_s", [0.0, 0.02])
def test_the_share_of_a_frame_is_found_again(share: float, once_s: float, stage: Stage) -> None:
    length = fit_length([make_row(shape, cost(shape, share, once_s), stage) for shape in SIZES])
    assert length.frame_share == pytest.approx(share, rel=1e-6)


def test_noise_does_not_move_it_far() -> None:
    noisy = [make_row(shape, cost(shape, 1.0) * factor) for shape, factor in zip(SIZES, (1, 1.1, 0.9, 1), strict=True)]
    assert 0.8 <= fit_length(noisy).frame_share <= 1.0


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 100.0, 300.0), (1.0, 1.5, 1.0, 2.0)])
def test_what_no_vae_does_is_not_believed(seconds: tuple[float, ...]) -> None:
    rows = [make_row(shape, each) for shape, each in zip(SIZES, seconds, strict=True)]
    assert 0.125 <= fit_length(rows).frame_share <= 1.0


def test_tokens_count_where_frames_cannot_be_told_from_pixels() -> None:
    tokens = StageLength()
    assert [tokens.measure(shape) for shape in SIZES] == [shape.tokens for shape in SIZES]
    assert fit_length([make_row(shape, cost(shape, 1.0), Stage.DIFFUSE) for shape in SIZES]) == tokens
    assert fit_length([make_row(Shape(side, side, 17), 1.0 * side) for side in (64, 128)]) == tokens
    assert fit_length([make_row(shape, 0.5, Stage.ENCODE) for shape in SIZES]) == tokens, "a prompt knows of no size"
    assert fit_length([]) == tokens


def test_other_sizes_of_videos_are_predicted() -> None:
    """Without the length they would be wrong by up to a half; a size that tokens cover is answered in any case."""
    rows = [
        make_row(shape, cost(shape, 1.0) if stage is Stage.DECODE else shape.tokens, stage)
        for stage in Stage
        for shape in SIZES
    ]
    weights = tuple(WeightsRow("m", stage, 1, "measured: here") for stage in Stage)
    times = CostModel([ProfileTable("t", tuple(rows), weights)], "cpu")
    for shape in (Shape(80, 80, 17), Shape(64, 96, 9), Shape(96, 96), Shape(96, 96, 5), Shape(64, 64, 5)):
        assert times.seconds("m", Stage.DECODE, shape) == pytest.approx(cost(shape, 1.0), rel=0.01)
        assert times.seconds("m", Stage.DIFFUSE, shape) == pytest.approx(shape.tokens, rel=0.01)


def test_frames_of_more_pixels_may_cost_more_than_in_proportion() -> None:
    """The decoder of a small video VAE on a CPU, as it was measured: four sizes, and four others."""
    known = {Shape(64, 64): 0.0294, Shape(80, 80, 5): 0.2657, Shape(64, 64, 17): 0.4635, Shape(96, 96, 17): 1.5863}
    others = {Shape(80, 80, 17): 1.1086, Shape(96, 64, 9): 0.4981, Shape(64, 64, 13): 0.3644, Shape(48, 80, 5): 0.122}
    length = fit_length([make_row(shape, seconds) for shape, seconds in known.items()])
    curve = make_size_curve(known, length)
    for shape, seconds in (known | others).items():
        assert curve(shape) == pytest.approx(seconds, rel=0.2), shape


@pytest.mark.parametrize("once_s", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_what_a_stage_does_once_is_not_counted_for_each_frame(once_s: float, share: float) -> None:
    known = {shape: cost(shape, share, once_s) for shape in SIZES}
    curve = make_size_curve(known, fit_length([make_row(shape, seconds) for shape, seconds in known.items()]))
    for shape in (*SIZES, Shape(80, 80, 17), Shape(96, 64, 9), Shape(96, 96), Shape(64, 64, 5)):
        assert curve(shape) == pytest.approx(cost(shape, share, once_s), rel=0.01)


# Of small decoders on a CPU, in bytes: of Wan, which works on four frames at a time, and of one that takes all at once.
PEAKS_BY_FOUR = {Shape(64, 64): 3_830_528, Shape(96, 96, 5): 24_100_000, Shape(96, 96, 17): 27_730_176}
PEAKS_AT_ONCE = {Shape(64, 64): 1_000_000, Shape(64, 64, 5): 4_000_000, Shape(64, 64, 17): 13_000_000}


@pytest.mark.parametrize(
    ("peaks", "shape", "expected"),
    [
        (PEAKS_BY_FOUR, Shape(128, 128, 5), 42_800_000),
        (PEAKS_BY_FOUR, Shape(128, 128), 15_200_000),
        (PEAKS_BY_FOUR, Shape(96, 128, 17), 36_900_000),
        (PEAKS_AT_ONCE, Shape(64, 64, 9), 7_000_000),
        (PEAKS_AT_ONCE, Shape(128, 128, 5), 16_000_000),
    ],
)
def test_the_memory_of_frames_is_read_from_the_rows(peaks: dict[Shape, int], shape: Shape, expected: int) -> None:
    length = fit_peak_length([make_row(size, 1.0, peak_bytes=peak) for size, peak in peaks.items()])
    assert make_size_curve(peaks, length)(shape) == pytest.approx(expected, rel=0.1)


def test_a_few_frames_are_expected_to_take_as_much_as_many_where_rows_do_not_say() -> None:
    peaks = {shape: peak for shape, peak in PEAKS_BY_FOUR.items() if shape.num_frames in (1, 17)}
    length = fit_peak_length([make_row(size, 1.0, peak_bytes=peak) for size, peak in peaks.items()])
    curve = make_size_curve(peaks, length)
    assert curve(Shape(96, 96, 5)) == pytest.approx(curve(Shape(96, 96, 17)), rel=0.01)
    assert curve(Shape(96, 96)) == pytest.approx(8_600_000, rel=0.02)


def test_memory_is_read_by_tokens_where_frames_cannot_be_told() -> None:
    tokens = StageLength()
    videos = [make_row(Shape(side, side, 17), 1.0, peak_bytes=side) for side in (64, 128)]
    assert fit_peak_length(videos) == tokens
    assert fit_peak_length([make_row(shape, 1.0, Stage.ENCODE, 7) for shape in SIZES]) == tokens, "of a prompt"
    assert fit_peak_length([make_row(shape, 1.0, Stage.DIFFUSE, round(shape.tokens)) for shape in SIZES]) == tokens
    assert fit_peak_length([make_row(shape, 1.0, peak_bytes=0) for shape in SIZES]) == tokens


def test_a_curve_goes_on_in_proportion_where_another_measure_covers_a_size() -> None:
    curve = TokenCurve([(10, 1.0), (20, 3.0)])
    assert [curve.read_nearby(length) for length in (5, 10, 20, 40)] == [1.0, 1.0, 3.0, 6.0]
