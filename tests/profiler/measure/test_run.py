"""The profiler on a tiny pipeline: real times, real memory, a table that planning can use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler import CostModel
from profiler.cost_model import BATCH_LATENCY_GROWTH
from profiler.measure.checks import ProfilePoint, Sweep
from profiler.measure.memory import measure_peak_bytes
from profiler.measure.run import MeasureOptions, measure
from profiler.measure.stages import Sample, Source, sample_decode, sample_encode
from tests.profiler.measure import short_of_memory
from tridentserve.errors import ModelFolderError, ProfileError
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

CPU = torch.device("cpu")
ONCE = MeasureOptions(repeats=1)


@pytest.fixture(scope="module")
def folder(tiny_cache: Path) -> Path:
    return ensure_tiny("sd3", tiny_cache)


def test_memory_is_counted_while_it_lives() -> None:
    x = torch.zeros(1000)  # 4000 bytes

    def two_at_once() -> torch.Tensor:
        doubled = x * 2
        shifted = doubled + 1
        del doubled
        return (shifted[10:].view(-1) * 2).add_(1)  # a view and an in-place change are no new memory

    assert measure_peak_bytes(two_at_once, {"x": x}, CPU) == 4000 + 2 * 4000
    chain = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000, bias=False) for _ in range(4)))
    with torch.no_grad():
        assert measure_peak_bytes(lambda: chain(x), {}, CPU) == 2 * 4000  # weights and unlisted inputs are not counted


def test_a_model_is_measured_at_every_size_and_degree(folder: Path) -> None:
    shapes, heard = [Shape(64, 64), Shape(128, 96)], list[tuple[ProfilePoint, Sample]]()
    options = MeasureOptions(repeats=2, passes=2)
    table = measure(
        Source(folder, "cpu"),
        "m",
        Sweep(shapes, [1, 2]),
        options,
        lambda point, sample, _: heard.append((point, sample)),
    )
    assert [ProfilePoint(row.stage, row.shape, row.degree) for row in table.rows] == Sweep(shapes, [1, 2]).list_points()
    assert len(heard) == 2 * len(table.rows)
    for row in table.rows:
        seconds = [sample.seconds for point, sample in heard if point == ProfilePoint(row.stage, row.shape, row.degree)]
        assert row.seconds == min(seconds)
    times = CostModel([table], "cpu")
    assert times.degrees("m", Stage.DIFFUSE) == (1, 2)
    assert times.peak_bytes("m", Stage.DECODE, shapes[1]) > 2 * times.peak_bytes("m", Stage.DECODE, shapes[0])
    assert times.weights_bytes("m", Stage.DIFFUSE) > 10_000
    assert times.seconds("m", Stage.ENCODE, shapes[0]) > 0
    # Float32: two prompts (guidance) of 333 tokens and a pooled one, 64 wide; 16 channels of 2 x 2 latents per token.
    assert times.output_bytes("m", Stage.ENCODE, shapes[0]) == 2 * (333 + 1) * 64 * 4
    assert times.output_bytes("m", Stage.DIFFUSE, shapes[1]) == 48 * 16 * 4 * 4
    assert times.output_bytes("m", Stage.DECODE, shapes[1]) == 128 * 96 * 3


def test_encoding_image_is_measured_with_one(tiny_cache: Path) -> None:
    """The output of E grows with the size of the output."""
    small, large = Shape(64, 64), Shape(256, 256)
    sweep = Sweep([small, large], stages=[Stage.ENCODE])
    table = measure(Source(ensure_tiny("flux_kontext", tiny_cache), "cpu"), "m", sweep, ONCE)
    assert [row.shape for row in table.rows] == [small, large]
    held = next(row for row in table.weights if row.stage is Stage.ENCODE)
    # Float32: 64 numbers for each token of the image, of which there are 16 and 256.
    at_most = held.output_bytes + held.output_bytes_per_token * large.tokens
    assert at_most == held.output_bytes + (256 - 16) * 64 * 4


def test_requests_have_the_guidance_that_is_asked_for(folder: Path) -> None:
    """The condition of SD3 without guidance has half as many rows; the rows of both do not go together in a table."""
    sweep = Sweep([Shape(64, 64)], stages=[Stage.ENCODE])
    usual, plain = (measure(Source(folder, "cpu", guidance_scale=scale), "m", sweep, ONCE) for scale in (None, 0.0))
    assert usual.weights[0].output_bytes == 2 * plain.weights[0].output_bytes
    assert ", guidance 0;" in plain.rows[0].source
    with pytest.raises(ProfileError, match="write into another table"):
        measure(Source(folder, "cpu"), "m", sweep, ONCE, known=plain)


@settings(max_examples=50)
@given(growth=st.floats(0.3, 1.0), degree=st.sampled_from([1, 2]))
def test_batches_are_doubled_while_they_pay(growth: float, degree: int) -> None:
    """A batch takes its size to the power of `growth` times what one takes."""
    sweep, seconds = Sweep([Shape(64, 64)], [degree], None, [Stage.DIFFUSE]), dict[ProfilePoint, float]()
    wanted = sweep.list_points()
    while wanted:
        for point in wanted:
            assert point not in seconds
            seconds[point] = 0.1 * point.batch**growth
        wanted = sweep.list_larger_batches(seconds)
    timed = sorted(point.batch for point in seconds)
    assert timed == [1, 2, 4, 8][: len(timed)]
    assert all(batch**growth < BATCH_LATENCY_GROWTH for batch in timed[:-1])
    assert timed[-1] == 8 or timed[-1] ** growth >= BATCH_LATENCY_GROWTH


def test_batches_that_pay_are_measured_and_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding takes as long for two as for one here, and longer for four; nothing else pays, or fits."""

    def decode(source: Source, inputs: GenerationInputs, condition: bytes, repeats: int, batch: int) -> Sample:
        sample = sample_decode(source, inputs, condition, 1, batch)
        return replace(sample, seconds=0.1 if batch < 4 else 0.2)

    def encode(source: Source, inputs: GenerationInputs, repeats: int, batch: int) -> Sample:
        if batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        return sample_encode(source, inputs, 1, batch)

    monkeypatch.setattr("profiler.measure.processes.sample_decode", decode)
    monkeypatch.setattr("profiler.measure.processes.sample_encode", encode)
    shape = Shape(64, 64)
    sweep = Sweep([shape], batches=None, stages=[Stage.ENCODE, Stage.DECODE])
    skipped: list[ProfilePoint] = []
    options = MeasureOptions(repeats=1, passes=2)
    table = measure(Source(folder, "cpu"), "m", sweep, options, on_skip=lambda point, _: skipped.append(point))
    assert [(row.stage, row.batch) for row in table.rows] == [
        (Stage.ENCODE, 1),
        *((Stage.DECODE, batch) for batch in (1, 2, 4)),
    ]
    assert skipped == [ProfilePoint(Stage.ENCODE, shape, batch=2)]


def test_what_cannot_be_measured_is_named(folder: Path, tmp_path: Path) -> None:
    source = Source(folder, "cpu")
    with pytest.raises(ProfileError, match="sd3 makes no 72x64: both sides must be multiples of 16"):
        measure(source, "m", Sweep([Shape(64, 72)], [1]), ONCE)
    with pytest.raises(ProfileError, match="nothing to measure"):
        measure(source, "m", Sweep([Shape(64, 64)], []), ONCE)
    with pytest.raises(ProfileError, match="nothing to measure"):
        measure(source, "m", Sweep([Shape(64, 64)], batches=[]), ONCE)
    with pytest.raises(ProfileError, match="they must be powers of two"):
        measure(source, "m", Sweep([Shape(64, 64)], [3]), ONCE)
    with pytest.raises(ModelFolderError, match=r"model_index.json is missing"):
        measure(Source(tmp_path, "cpu"), "m", Sweep([Shape(64, 64)], [1]), ONCE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_degrees_need_gpus(folder: Path) -> None:
    with pytest.raises(ProfileError, match="degree 2 needs as many GPUs; there are 0"):
        measure(Source(folder, "cuda"), "m", Sweep([Shape(64, 64)], [2]), ONCE)


def test_a_point_beyond_the_memory_is_left_out_and_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(source: Source, inputs: GenerationInputs, condition: bytes, repeats: int, batch: int) -> Sample:
        if inputs.shape.width > 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        return sample_decode(source, inputs, condition, repeats, batch)

    monkeypatch.setattr("profiler.measure.processes.sample_decode", decode)
    shapes, skipped = [Shape(64, 64), Shape(64, 96)], list[tuple[ProfilePoint, str]]()
    options = MeasureOptions(repeats=1, passes=2)
    table = measure(
        Source(folder, "cpu"),
        "m",
        Sweep(shapes, [1]),
        options,
        on_skip=lambda point, reason: skipped.append((point, reason)),
    )
    assert skipped == [(ProfilePoint(Stage.DECODE, Shape(64, 96)), "out of memory (CUDA out of memory)")]
    assert [ProfilePoint(row.stage, row.shape) for row in table.rows] == Sweep(shapes).list_points()[:-1]


def test_the_stages_after_an_encode_that_failed_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory. Buy more.")

    monkeypatch.setattr("profiler.measure.processes.sample_encode", encode)
    reasons: list[str] = []
    with pytest.raises(ProfileError, match="no point of m could be measured"):
        measure(
            Source(folder, "cpu"),
            "m",
            Sweep([Shape(64, 64)], [1]),
            ONCE,
            on_skip=lambda _, reason: reasons.append(reason),
        )
    assert reasons[0].startswith("out of memory")
    assert reasons[1:] == ["its encode stage could not be measured"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("diffuse", [short_of_memory.rank_1, short_of_memory.rank_0], ids=["rank 1", "rank 0"])
def test_a_rank_without_memory_is_distinguished_from_a_broken_group(
    folder: Path, monkeypatch: pytest.MonkeyPatch, diffuse: Callable[..., Sample]
) -> None:
    """The other rank waits for it in vain, and its error is not the one that is reported."""
    monkeypatch.setattr("profiler.measure.processes.sample_diffuse", diffuse)
    monkeypatch.setattr("profiler.measure.stages._GROUP_TIMEOUT_S", 3.0)
    skipped: list[tuple[ProfilePoint, str]] = []
    shape = Shape(64, 64)
    table = measure(
        Source(folder, "cpu"),
        "m",
        Sweep([shape], [1, 2]),
        ONCE,
        on_skip=lambda point, reason: skipped.append((point, reason)),
    )
    assert skipped == [(ProfilePoint(Stage.DIFFUSE, shape, 2), "out of memory (CUDA out of memory)")]
    assert len(table.rows) == 3


def test_other_errors_are_not_taken_for_a_lack_of_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("profiler.measure.processes.sample_encode", encode)
    with pytest.raises(RuntimeError, match="mat1"):
        measure(Source(folder, "cpu"), "m", Sweep([Shape(64, 64)], [1]), ONCE)
