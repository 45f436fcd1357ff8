"""Requests whose steps may take over what earlier ones found: the first-block cache of diffusers, row by row, and that
of the patches of a U-Net, in states that can be moved and batched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache

from profiler.measure.memory import measure_peak_bytes
from tests.pipelines.models import ALL, WITH_IMAGES, families, load_stage, make_inputs, start
from tridentserve.models.families import FAMILIES
from tridentserve.models.number_formats import NumberFormat
from tridentserve.models.step_cache import StepCache, count_cache_bytes
from tridentserve.pipelines import DenoisingState, PipelineAdapter, load_adapter
from tridentserve.pipelines.base import CACHE_LIMIT, SKIPPED_STEPS
from tridentserve.stages import Stage

Model = Callable[[str], Path]
CACHING = tuple(name for name in ALL if FAMILIES[name].caches_steps)
STEPS = 6


def with_limit(state: DenoisingState, limit: float) -> DenoisingState:
    changed = copy.deepcopy(state)
    changed.values[CACHE_LIMIT] = limit
    return changed


def finish(diffuse: PipelineAdapter, state: DenoisingState) -> DenoisingState:
    while state.step < state.num_steps:
        state = diffuse.step(state)
    return state


@pytest.mark.parametrize("variant", families(*CACHING))
def test_only_steps_that_change_little_are_left_out(model: Model, variant: str) -> None:
    diffuse = load_stage(model(variant), Stage.DIFFUSE)
    state = start(model(variant), make_inputs(64, 64, steps=STEPS, variant=variant))
    exact, careful, careless = (finish(diffuse, with_limit(state, limit)) for limit in (0.0, 1e-9, 1e9))
    assert careful.values[SKIPPED_STEPS] == 0
    assert torch.equal(careful.tensors["latents"], exact.tensors["latents"])
    assert careless.values[SKIPPED_STEPS] == STEPS - 1
    assert not torch.allclose(careless.tensors["latents"], exact.tensors["latents"], atol=1e-3)
    assert not any(name.startswith("cache.") for name in exact.tensors)


def find_limit_between(diffuse: PipelineAdapter, state: DenoisingState) -> float:
    """A limit at which some steps are left out, and not all that could be."""
    limit: float
    for limit in torch.logspace(-2, 1, 24).tolist():
        if 0 < finish(diffuse, with_limit(state, limit)).values[SKIPPED_STEPS] < STEPS - 1:
            return limit
    raise AssertionError("no such limit")


@pytest.mark.parametrize("variant", ["flux", "hunyuan_video"])
def test_one_row_is_what_diffusers_makes_of_it(model: Model, variant: str) -> None:
    """Families with one row: diffusers decides for all rows together."""
    folder, inputs = model(variant), make_inputs(64, 64, steps=STEPS, variant=variant)
    diffuse, state = load_stage(folder, Stage.DIFFUSE), start(folder, inputs)
    limit = find_limit_between(diffuse, state)
    ours = finish(diffuse, with_limit(state, limit))
    theirs = load_adapter(folder, frozenset({Stage.DIFFUSE}))
    transformer = theirs.pipe.transformer  # type: ignore[attr-defined]
    apply_first_block_cache(transformer, FirstBlockCacheConfig(threshold=limit))
    assert torch.equal(ours.tensors["latents"], finish(theirs, with_limit(state, 0.0)).tensors["latents"])


@pytest.mark.parametrize(
    "variant", families("sd3", "flux", "wan", "qwen_image", "z_image", *WITH_IMAGES, "flux2_klein", "cogvideox", "sdxl")
)
def test_members_of_a_batch_decide_for_themselves(model: Model, variant: str) -> None:
    """One is exact, one begins later, and one has two outputs; each gets what it gets alone."""
    folder = model(variant)
    diffuse = load_stage(folder, Stage.DIFFUSE)
    first, late, two = (
        start(folder, make_inputs(64, 64, steps=STEPS, seed=seed, num_outputs=outputs, variant=variant))
        for seed, outputs in ((1, 1), (2, 1), (3, 2))
    )
    limit = find_limit_between(diffuse, two)
    late = diffuse.step(diffuse.step(with_limit(late, limit)))
    members: Sequence[DenoisingState] = [with_limit(first, 0.0), late, with_limit(two, limit)]
    alone = [finish(diffuse, member) for member in members]
    while len(members) == 3:
        members = diffuse.advance(members)
        ended = [member for member in members if member.step == member.num_steps]
        members = [member for member in members if member.step < member.num_steps]
        for member in ended:
            assert_same(member, alone[1])
    for member, expected in zip([finish(diffuse, member) for member in members], (alone[0], alone[2]), strict=True):
        assert_same(member, expected)
    assert alone[0].values[SKIPPED_STEPS] == 0 < alone[2].values[SKIPPED_STEPS]


def assert_same(state: DenoisingState, expected: DenoisingState) -> None:
    assert (state.tensors["latents"] - expected.tensors["latents"]).abs().max() <= 1e-4
    assert state.values[SKIPPED_STEPS] == expected.values[SKIPPED_STEPS]


def test_limits_are_those_of_the_quality_and_the_model(model: Model) -> None:
    diffuse = load_adapter(model("sd3"), frozenset({Stage.DIFFUSE}))
    condition = load_stage(model("sd3"), Stage.ENCODE).encode(make_inputs(64, 64))
    diffuse.step_cache = StepCache(high=0.01, fast=0.3)
    limits = [
        diffuse.prepare(condition, make_inputs(64, 64, quality=quality)).values[CACHE_LIMIT]
        for quality in ("exact", "high", "fast")
    ]
    assert limits == [0.0, 0.01, 0.3]


def test_models_with_two_transformers_compute_all_steps(model: Model) -> None:
    diffuse = load_stage(model("wan-2.2"), Stage.DIFFUSE)
    state = start(model("wan-2.2"), make_inputs(64, 64, quality="fast", variant="wan-2.2"))
    assert state.values[CACHE_LIMIT] == 0
    assert finish(diffuse, state).values[SKIPPED_STEPS] == 0


@pytest.mark.parametrize("variant", ["sd3", "flux", "flux_kontext", "flux2_klein", "z_image", "sdxl"])
def test_the_memory_of_a_cache_is_at_most_what_a_worker_expects(model: Model, variant: str) -> None:
    folder = model(variant)
    diffuse = load_stage(folder, Stage.DIFFUSE)
    peaks_bytes = []
    for quality in ("exact", "fast"):
        inputs = make_inputs(256, 256, steps=STEPS, num_outputs=2, quality=quality, variant=variant)
        state = diffuse.step(start(folder, inputs))
        peaks_bytes.append(measure_peak_bytes(lambda: diffuse.step(state), state.tensors, torch.device("cpu")))  # noqa: B023
    formats: dict[str, NumberFormat] = {"transformer": "float32", "unet": "float32"}
    expected_bytes = count_cache_bytes(folder, [inputs], formats, StepCache())
    assert 0.4 * expected_bytes <= peaks_bytes[1] - peaks_bytes[0] <= 1.05 * expected_bytes
    assert count_cache_bytes(folder, [replace(inputs, quality="exact")], formats, StepCache()) == 0
    assert count_cache_bytes(folder, [inputs], formats, StepCache(fast=0)) == 0
