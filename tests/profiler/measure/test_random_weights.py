"""Models of random weights are, but for the numbers, what a model folder makes; and profiling with them works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.measure.checks import Sweep
from profiler.measure.random_weights import count_weights_bytes, make_random_adapter, write_published
from profiler.measure.run import MeasureOptions, measure
from profiler.measure.stages import Source
from tests.pipelines.models import families, formats_of, make_inputs
from tridentserve.models.model_folder import stage_weights_bytes
from tridentserve.models.number_formats import NumberFormats
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.pipelines.weights import named_tensors
from tridentserve.requests import Shape
from tridentserve.stages import Stage

RANDOM = ("sd3", "flux", "sdxl", "cogvideox", "hunyuan_video", "wan")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", {"E": "float16", "D": "bfloat16"}], ids=str)
@pytest.mark.parametrize(
    "family", families("sd3", "flux", "sdxl", "cogvideox", "hunyuan_video", "wan", quick=("sd3", "wan"))
)
def test_they_differ_from_loaded_models_in_numbers_only(tiny_cache: Path, family: str, dtype: Any) -> None:
    folder = ensure_tiny(family, tiny_cache)
    formats = formats_of(folder, dtype)
    for stage in Stage:
        loaded = named_tensors(load_adapter(folder, frozenset({stage}), formats=formats))
        made = named_tensors(make_random_adapter(folder, frozenset({stage}), formats=formats))
        assert made.keys() == loaded.keys()
        for name, tensor in loaded.items():
            assert (made[name].shape, made[name].dtype) == (tensor.shape, tensor.dtype), name
            assert isinstance(made[name], torch.nn.Parameter) == isinstance(tensor, torch.nn.Parameter), name
            if not isinstance(tensor, torch.nn.Parameter):
                assert torch.equal(made[name], tensor), f"{name} is computed, not learned"


def test_what_they_make_is_finite_and_of_the_right_form(tiny_cache: Path) -> None:
    folder = ensure_tiny("sd3", tiny_cache)
    inputs = make_inputs(64, 64)
    adapter = make_random_adapter(folder, frozenset(Stage), formats=formats_of(folder, "bfloat16"))
    state = adapter.prepare(adapter.encode(inputs), inputs)
    latents = adapter.latents(adapter.step(state, state.num_steps))
    assert torch.isfinite(latents["latents"]).all()
    assert latents["latents"].std() > 0.1
    assert adapter.decode(latents, inputs).shape == (1, 64, 64, 3)


def test_their_bytes_are_those_of_a_model_folder(tiny_cache: Path) -> None:
    folder = ensure_tiny("flux", tiny_cache)
    formats = formats_of(folder, {"E": "bfloat16", "C": "bfloat16"})
    counted, stored = count_weights_bytes(folder, formats), stage_weights_bytes(folder, formats)
    assert counted.keys() == stored.keys()
    for stage, num_bytes in stored.items():
        # Buffers that are computed are in no model folder, and take memory all the same.
        assert num_bytes <= counted[stage] <= 1.1 * num_bytes + 1e5


@pytest.mark.slow
def test_a_stage_alone_is_measured_without_the_full_text_encoders(tmp_path: Path) -> None:
    """The real decoder of SD3, 84 million parameters. Its text encoders would need 11 GB."""
    folder = write_published("sd3-medium", tmp_path / "full")
    source = Source(
        folder, "cpu", NumberFormats.parse("bfloat16"), random_weights=True, condition_folder=_tiny_condition(tmp_path)
    )
    table = measure(source, "sd3", Sweep([Shape(64, 64)], stages=[Stage.DECODE]), MeasureOptions(1))
    (row,) = table.rows
    assert (row.stage, row.shape) == (Stage.DECODE, Shape(64, 64))
    assert row.source.startswith("measured: torch ")
    assert "bfloat16, attention sdpa, not compiled, threads 1, random weights; " in row.source
    weights = {held.stage: held.weights_bytes for held in table.weights}
    assert weights[Stage.DIFFUSE] > 4e9
    assert weights[Stage.DECODE] == pytest.approx(2 * 83.8e6, rel=0.01)
    # At full resolution the decoder holds at least two maps of 128 channels.
    assert row.peak_bytes > 2 * 128 * 64 * 64 * 2


def _tiny_condition(tmp_path: Path) -> Path:
    return ensure_tiny("sd3", tmp_path)


def test_weights_beyond_the_memory_are_refused_before_they_are_made(tmp_path: Path) -> None:
    folder = write_published("flux.1-dev", tmp_path / "flux", few_text_layers=True)
    (free_kib,) = (
        int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    if free_kib * 1024 > 23.9e9 * 2:
        pytest.skip("this machine has room for FLUX.1 in float32")
    with pytest.raises(MemoryError, match=r"the weights take 47\d+ bytes"):
        make_random_adapter(folder, frozenset({Stage.DIFFUSE}))
