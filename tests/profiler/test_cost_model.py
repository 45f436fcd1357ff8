"""The cost model: exact where it was profiled, honest where it was not, and corrected by what it sees."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler import CostModel, ProfileTable, read_shipped_table
from profiler.cost_model import MAX_CORRECTION
from profiler.memory import compute_peak_bytes_by_degree
from profiler.tables.links import DEFAULT_LINKS, LinkSpeeds
from profiler.tables.rows import LinksRow
from tests.profiler.synthetic import (
    CONDITION_BYTES,
    DEGREES,
    SHAPES,
    WEIGHTS_BYTES,
    cost_model,
    row,
    step_seconds,
    table,
    wide_only_table,
)
from tridentserve.errors import ProfileError
from tridentserve.protocols import StageTimes
from tridentserve.requests import Shape
from tridentserve.stages import Stage

SLOW_LINKS = LinkSpeeds(4e6, 1e6, 2e6, 5e5, transfer_latency_s=0.5, load_latency_s=3.0)


def test_it_is_a_stage_times() -> None:
    times: StageTimes = cost_model()
    assert times.degrees("one", Stage.DIFFUSE) == DEGREES
    assert times.degrees("one", Stage.ENCODE) == (1,)
    assert times.weights_bytes("one", Stage.DIFFUSE) == WEIGHTS_BYTES[Stage.DIFFUSE]


def test_exact_at_profiled_points() -> None:
    times = cost_model()
    for shape in SHAPES:
        for degree in DEGREES:
            assert times.seconds("one", Stage.DIFFUSE, shape, degree) == step_seconds(shape, degree)
    assert times.peak_bytes("two", Stage.DECODE, Shape(512, 512)) == 1536 * 512 * 512


sides = st.integers(16, 128).map(lambda n: 16 * n)


@given(st.lists(st.builds(Shape, sides, sides), min_size=2, max_size=10), st.sampled_from(DEGREES))
def test_monotone_in_tokens_between_them(shapes: list[Shape], degree: int) -> None:
    times = cost_model()
    ordered = sorted(shapes, key=lambda shape: shape.tokens)
    for smaller, larger in pairwise(ordered):
        seconds = [times.seconds("one", Stage.DIFFUSE, shape, degree) for shape in (smaller, larger)]
        peaks = [times.peak_bytes("one", Stage.DIFFUSE, shape, degree) for shape in (smaller, larger)]
        assert seconds[0] <= seconds[1] * (1 + 1e-9)
        assert peaks[0] <= peaks[1]


@pytest.mark.parametrize(
    ("model", "shape", "degree", "batch", "message"),
    [
        ("three", SHAPES[0], 1, 1, r"model 'three' is not in the profile tables of device 'gpu' \(there: one, two\)"),
        ("one", Shape(128, 128), 1, 1, "128x128 is outside the profiled sizes, 256x256 to 2048x2048; profile it"),
        ("one", Shape(2048, 2064), 2, 1, "--sizes 2064x2048"),
        ("one", SHAPES[0], 8, 1, r"was not profiled at degree 8 \(only at \(1, 2, 4\)\)"),
        ("one", SHAPES[0], 1, 0, "a batch of 0 cannot be timed"),
    ],
)
def test_what_was_not_profiled_is_an_error_that_says_so(
    model: str, shape: Shape, degree: int, batch: int, message: str
) -> None:
    for ask in (cost_model().seconds, cost_model().peak_bytes):
        with pytest.raises(ProfileError, match=message):
            ask(model, Stage.DIFFUSE, shape, degree, batch)


def test_unknown_models_have_no_degrees_and_no_weights() -> None:
    for ask in (cost_model().degrees, cost_model().weights_bytes):
        with pytest.raises(ProfileError, match="'three' is not in the profile"):
            ask("three", Stage.DIFFUSE)


def test_the_optimal_degree_is_the_highest_efficient_one() -> None:
    times = cost_model()
    found = [times.optimal_degree("one", Stage.DIFFUSE, shape) for shape in SHAPES]
    for shape, degree in zip(SHAPES, found, strict=True):
        efficient = [k for k in DEGREES if step_seconds(shape, 1) / (k * step_seconds(shape, k)) > 0.8]
        assert degree == max(efficient)
    assert found[0] == 1
    assert found[-1] > 1


def test_a_batch_is_read_where_profiled_and_grows_in_proportion_beyond() -> None:
    shape = SHAPES[0]
    with_batch = replace(table(), rows=(*table().rows, row("one", Stage.DIFFUSE, shape, 1, 0.03, 900, batch=4)))
    times = CostModel([with_batch], "gpu")
    single_s = step_seconds(shape, 1)
    assert times.seconds("one", Stage.DIFFUSE, shape, 1, batch=2) == pytest.approx(2 * single_s)
    assert times.seconds("one", Stage.DIFFUSE, shape, 1, batch=4) == 0.03
    assert times.seconds("one", Stage.DIFFUSE, shape, 1, batch=8) == pytest.approx(0.06)
    assert times.peak_bytes("one", Stage.DIFFUSE, shape, 1, batch=8) == 1800
    # The batch was not profiled at this size, and encoding takes a batch at the price of one.
    assert times.seconds("one", Stage.DIFFUSE, SHAPES[1], 1, 4) == pytest.approx(4 * step_seconds(SHAPES[1], 1))
    assert times.seconds("one", Stage.ENCODE, shape, 1, batch=8) == times.seconds("one", Stage.ENCODE, shape)


@given(st.floats(1 / MAX_CORRECTION, MAX_CORRECTION), st.floats(0.9, 1.1))
def test_a_wrong_table_converges(factor: float, noise: float) -> None:
    times = cost_model()
    tabled_s = times.seconds("one", Stage.DIFFUSE, SHAPES[1], 2)
    for number in range(40):
        times.observe("one", Stage.DIFFUSE, SHAPES[1], 2, 1, factor * tabled_s * (noise if number % 2 else 1 / noise))
    assert times.seconds("one", Stage.DIFFUSE, SHAPES[1], 2) == pytest.approx(factor * tabled_s, rel=0.15)


def test_a_degree_of_which_nothing_was_observed_is_corrected_like_the_others() -> None:
    """On a shared or slower device the degrees in use would else look dear beside those that are not."""
    times, asked = cost_model(), SHAPES[1]
    before = {degree: times.seconds("one", Stage.DIFFUSE, asked, degree) for degree in DEGREES[:-1]}
    for _ in range(30):
        times.observe("one", Stage.DIFFUSE, asked, 1, 1, 3 * before[1])
    for degree, seconds in before.items():
        assert times.seconds("one", Stage.DIFFUSE, asked, degree) == pytest.approx(3 * seconds, rel=0.05)
    new = cost_model().seconds("one", Stage.DIFFUSE, asked, DEGREES[-1])  # nobody had asked for it
    assert times.seconds("one", Stage.DIFFUSE, asked, DEGREES[-1]) == pytest.approx(3 * new, rel=0.05)
    assert times.optimal_degree("one", Stage.DIFFUSE, asked) == cost_model().optimal_degree("one", Stage.DIFFUSE, asked)
    for _ in range(30):
        times.observe("one", Stage.DIFFUSE, asked, 2, 1, before[2])
    assert times.seconds("one", Stage.DIFFUSE, asked, 2) == pytest.approx(before[2], rel=0.05)
    assert times.seconds("one", Stage.DIFFUSE, asked, 1) == pytest.approx(3 * before[1], rel=0.05)


def test_a_correction_is_bounded_and_stays_with_its_key() -> None:
    times = cost_model()
    before = {degree: times.seconds("one", Stage.DIFFUSE, SHAPES[1], degree) for degree in DEGREES}
    for no_time_s in (-1.0, 0.0, float("nan"), float("inf")):
        times.observe("one", Stage.DIFFUSE, SHAPES[1], 4, 1, no_time_s)
    assert {degree: times.seconds("one", Stage.DIFFUSE, SHAPES[1], degree) for degree in DEGREES} == before
    for degree in (1, 4):  # what was observed stays as it was, whatever others take
        times.observe("one", Stage.DIFFUSE, SHAPES[1], degree, 1, before[degree])
    for _ in range(50):
        times.observe("one", Stage.DIFFUSE, SHAPES[1], 2, 1, 1e9)
    for degree in DEGREES:
        assert times.seconds("one", Stage.DIFFUSE, SHAPES[1], degree) <= MAX_CORRECTION * before[degree]
    assert times.seconds("one", Stage.DIFFUSE, SHAPES[1], 1) == before[1]
    assert times.seconds("one", Stage.DIFFUSE, SHAPES[1], 4) == before[4]
    assert times.seconds("two", Stage.DIFFUSE, SHAPES[1], 2) == before[2]
    assert times.seconds("one", Stage.DIFFUSE, SHAPES[2], 2) == step_seconds(SHAPES[2], 2)


def test_three_times_too_fast_a_table_is_right_after_ten_stages() -> None:
    times = cost_model()
    for _ in range(10):
        times.observe("one", Stage.DIFFUSE, SHAPES[2], 1, 1, 3 * step_seconds(SHAPES[2], 1))
    assert times.seconds("one", Stage.DIFFUSE, SHAPES[2], 1) == pytest.approx(3 * step_seconds(SHAPES[2], 1), rel=0.1)
    # The whole octave learns, also sizes that nobody has asked for yet.
    wider = times.seconds("one", Stage.DIFFUSE, Shape(1024, 1040), 1)
    assert wider == pytest.approx(3 * cost_model().seconds("one", Stage.DIFFUSE, Shape(1024, 1040), 1), rel=0.1)


def test_outputs_are_what_the_table_says_per_prompt_and_per_token() -> None:
    times = cost_model()
    assert times.output_bytes("one", Stage.ENCODE, SHAPES[3], batch=3) == 3 * CONDITION_BYTES
    assert times.output_bytes("one", Stage.DIFFUSE, Shape(512, 512)) == 1024 * 128
    assert times.output_bytes("one", Stage.DECODE, Shape(512, 768), batch=2) == 2 * 3 * 512 * 768
    for ask in (times.output_bytes, times.transfer_seconds):
        with pytest.raises(ProfileError, match="'three' is not in the profile"):
            ask("three", Stage.ENCODE, SHAPES[0])
    with pytest.raises(ProfileError, match="'three' is not in the profile"):
        times.load_seconds("three", Stage.ENCODE)


def test_transfers_and_loads_go_over_their_links() -> None:
    times = CostModel([linked(table())], "gpu", SLOW_LINKS)  # the argument wins
    latent_bytes = times.output_bytes("one", Stage.DIFFUSE, SHAPES[1], 2)
    weights_bytes = times.weights_bytes("one", Stage.DIFFUSE)
    assert times.transfer_seconds("one", Stage.DIFFUSE, SHAPES[1], 2) == 0.5 + latent_bytes / 4e6
    assert times.transfer_seconds("one", Stage.DIFFUSE, SHAPES[1], 2, same_node=False) == 0.5 + latent_bytes / 1e6
    assert times.load_seconds("one", Stage.DIFFUSE, "peer") == 3 + weights_bytes / 4e6
    assert times.load_seconds("one", Stage.DIFFUSE) == 3 + weights_bytes / 2e6
    assert times.load_seconds("one", Stage.DIFFUSE, "disk") == 3 + weights_bytes / 5e5
    assert CostModel([linked(table())], "gpu").links.host_bytes_per_s == 1.0
    assert cost_model().links == DEFAULT_LINKS


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ((0.0, 1.0, 1.0, 1.0), "intra_node_bytes_per_s is 0.0; it must be above 0"),
        ((1.0, 1.0, 1.0, float("nan")), "disk_bytes_per_s is nan; it must be above 0"),
        ((1.0, 1.0, 1.0, 1.0, -1.0), "transfer_latency_s is -1.0; it must be at least 0"),
        ((1.0, 1.0, 1.0, 1.0, 0.0, float("inf")), "load_latency_s is inf; it must be at least 0 and finite"),
    ],
)
def test_links_that_cannot_be_are_refused(speeds: tuple[float, ...], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        LinkSpeeds(*speeds)


def test_the_optimal_batch_is_the_largest_that_costs_under_a_fifth_more() -> None:
    single_s = step_seconds(SHAPES[0], 1)
    batches = {2: 1.1, 4: 1.19, 8: 1.21}
    more = [row("one", Stage.DIFFUSE, SHAPES[0], 1, grown * single_s, 9, batch=b) for b, grown in batches.items()]
    times = CostModel([replace(table(), rows=(*table().rows, *more))], "gpu")
    assert times.optimal_batch("one", Stage.DIFFUSE, SHAPES[0]) == 4
    assert times.optimal_batch("one", Stage.DIFFUSE, SHAPES[0], degree=2) == 1  # no batch was profiled there
    assert times.optimal_batch("one", Stage.DIFFUSE, SHAPES[1]) == 1
    with pytest.raises(ProfileError, match="64x64 is outside the profiled sizes"):
        times.optimal_batch("one", Stage.DIFFUSE, Shape(64, 64))
    with pytest.raises(ProfileError, match="not profiled at degree 8"):
        times.optimal_batch("one", Stage.DIFFUSE, SHAPES[0], degree=8)


def test_forgetting_points_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.cost_model._MAX_REMEMBERED", 2)
    times = cost_model()
    times.observe("one", Stage.DIFFUSE, SHAPES[0], 1, 1, 3 * step_seconds(SHAPES[0], 1))
    learned_s = times.seconds("one", Stage.DIFFUSE, SHAPES[0])
    for shape in SHAPES:
        times.seconds("one", Stage.DIFFUSE, shape)
    assert times.seconds("one", Stage.DIFFUSE, SHAPES[0]) == learned_s > step_seconds(SHAPES[0], 1)


def without(stage: Stage, *, weights: bool = False) -> ProfileTable:
    whole = table()
    if weights:
        return replace(whole, weights=tuple(held for held in whole.weights if held.stage is not stage))
    return replace(whole, rows=tuple(entry for entry in whole.rows if entry.stage is not stage))


def heavier(*models: str) -> ProfileTable:
    """Rows of model `two`, and other weights of these models."""
    weights = tuple(replace(held, weights_bytes=held.weights_bytes + 1) for held in table(models).weights)
    return replace(table(("two",)), weights=weights)


def linked(whole: ProfileTable, speed: float = 1.0) -> ProfileTable:
    return replace(whole, links=(LinksRow("gpu", replace(SLOW_LINKS, host_bytes_per_s=speed), "modelled: a test"),))


@pytest.mark.parametrize(
    ("tables", "device", "message"),
    [
        ([table()], "NVIDIA L20", r"no profile row is for device 'NVIDIA L20' \(devices profiled: gpu\)"),
        ([], "gpu", "devices profiled: none"),
        ([table(), table()], "gpu", "one encode 256x256 at degree 1, batch 1 is in another table too"),
        ([table(("one",)), heavier("two", "one")], "gpu", "one encode has other weights_bytes elsewhere"),
        ([linked(table(("one",))), linked(table(("two",)), 2.0)], "gpu", "the links of 'gpu' are faster or slower in"),
        ([without(Stage.DECODE)], "gpu", "one has no decode rows at degree 1 and batch 1"),
        ([without(Stage.DECODE, weights=True)], "gpu", "one has no weights_bytes for decode"),
    ],
)
def test_tables_that_cannot_stand_alone_are_refused(tables: list[ProfileTable], device: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        CostModel(tables, device)


def test_devices_may_hold_a_model_in_different_precisions() -> None:
    half = table()
    cpu = replace(
        half,
        rows=tuple(replace(entry, gpu="cpu") for entry in half.rows),
        weights=tuple(replace(held, weights_bytes=2 * held.weights_bytes) for held in half.weights),
    )
    for tables in ([half, cpu], [cpu, half]):
        assert CostModel(tables, "gpu").weights_bytes("one", Stage.DIFFUSE) == WEIGHTS_BYTES[Stage.DIFFUSE]
        assert CostModel(tables, "cpu").weights_bytes("one", Stage.DIFFUSE) == 2 * WEIGHTS_BYTES[Stage.DIFFUSE]


def test_a_degree_without_batch_1_is_refused() -> None:
    extra = replace(table(), rows=(*table().rows, row("one", Stage.DECODE, SHAPES[0], 2, 1.0, 1, batch=2)))
    with pytest.raises(ProfileError, match="one decode at degree 2 has no batch 1 rows"):
        CostModel([extra], "gpu")


def test_a_degree_that_covers_fewer_sizes_is_left_out_there() -> None:
    rows = tuple(r for r in table().rows if r.degree < 4 or r.shape.height >= 1024)
    times = CostModel([replace(table(), rows=rows)], "gpu")
    assert sorted(compute_peak_bytes_by_degree(times, "one", (Stage.DIFFUSE,), SHAPES[0], DEGREES)) == [1, 2]
    assert times.optimal_degree("one", Stage.DIFFUSE, SHAPES[0]) == 1
    with pytest.raises(ProfileError, match="outside the profiled sizes"):
        compute_peak_bytes_by_degree(times, "one", (Stage.DIFFUSE,), Shape(64, 64), DEGREES)


def test_efficiency_is_relative_to_the_narrowest_degree_that_covers_the_size() -> None:
    times = CostModel([wide_only_table()], "gpu")
    for shape in SHAPES[2:]:
        relative = 2 * step_seconds(shape, 2) / (4 * step_seconds(shape, 4))
        assert times.optimal_degree("one", Stage.DIFFUSE, shape) == (4 if relative > 0.8 else 2)
    assert times.optimal_degree("one", Stage.DIFFUSE, SHAPES[0]) == 1
    slow = tuple(replace(r, seconds=9.0) if r.degree == 4 else r for r in wide_only_table().rows)
    narrow = CostModel([replace(table(), rows=slow)], "gpu")
    assert narrow.optimal_degree("one", Stage.DIFFUSE, SHAPES[2]) == 2
    with pytest.raises(ProfileError, match="64x64 is outside the profiled sizes"):
        times.optimal_degree("one", Stage.DIFFUSE, Shape(64, 64))


def test_the_shipped_table_covers_the_tiny_models() -> None:
    times = CostModel([read_shipped_table("tiny-cpu")], "cpu")
    assert times.models == ("tiny-flux", "tiny-sd3")
    for model in times.models:
        assert times.degrees(model, Stage.DIFFUSE) == (1, 2, 4)
        for shape in (Shape(64, 64), Shape(80, 64), Shape(1024, 64), Shape(720, 1024), Shape(1024, 1024)):
            seconds = [times.seconds(model, Stage.DIFFUSE, shape, degree) for degree in (1, 2, 4)]
            assert min(seconds) > 0.001
            assert times.seconds(model, Stage.DECODE, shape) > 0.001
            assert times.seconds(model, Stage.ENCODE, shape) > 0.001


def test_a_snapshot_keeps_what_was_learned_and_shares_nothing_that_changes() -> None:
    times = CostModel([table()], "gpu")
    point = ("one", Stage.DIFFUSE, SHAPES[0])
    times.observe(*point, 1, 1, 2 * times.seconds(*point))
    copied = times.take_snapshot()
    learned_s = times.seconds(*point)
    assert copied.seconds(*point) == learned_s
    times.observe(*point, 1, 1, 8 * learned_s)
    assert times.seconds(*point) > learned_s
    assert copied.seconds(*point) == learned_s
    times.extend([table(("late",))])
    assert ("late" in times.models, "late" in copied.models) == (True, False)


def test_the_memory_table_says_what_the_cost_model_says() -> None:
    times = CostModel([table()], "gpu")
    memory = times.build_memory_table()
    for stage in Stage:
        assert memory.degrees("one", stage) == times.degrees("one", stage)
        for degree in times.degrees("one", stage):
            for shape in SHAPES:
                for batch in (1, 3):
                    expected = times.peak_bytes("one", stage, shape, degree, batch)
                    assert memory.peak_bytes("one", stage, shape, degree, batch) == expected
    with pytest.raises(ProfileError):
        memory.peak_bytes("no such model", Stage.DIFFUSE, SHAPES[0])
