"""Patches of SDXL's images take over what blocks added at an earlier step, and each request gets what it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel

from tests.pipelines.adapters.test_step_caches import assert_same, finish, with_limit
from tests.pipelines.models import load_stage, make_inputs, start
from tridentserve.errors import ConfigError
from tridentserve.models.families import FAMILIES
from tridentserve.models.step_cache import StepCache
from tridentserve.pipelines import DenoisingState, load_adapter
from tridentserve.pipelines.adapters.sdxl import SDXLAdapter
from tridentserve.pipelines.base import CACHE_LIMIT, SKIPPED_STEPS
from tridentserve.pipelines.reuse.patch_pass import (
    KeptStack,
    PassRows,
    PatchGrid,
    PatchPass,
    install_reuse,
    use_patch_passes,
)
from tridentserve.pipelines.reuse.predictor import ReusePredictor
from tridentserve.stages import Stage

Model = Callable[[str], Path]
STEPS = 8
# Reuses where the change is below the limit.
PLAIN = ReusePredictor((0.0, -1.0, 0.0, 0.0, 1.0))


def begin(folder: Path, height: int, width: int, **changes: Any) -> DenoisingState:
    return start(folder, make_inputs(height, width, STEPS, variant="sdxl", **changes))


def find_limit(diffuse: SDXLAdapter, state: DenoisingState) -> float:
    """A limit at which some patches are computed at most steps, and some are not."""
    limit: float
    for limit in torch.logspace(-0.8, 0.4, 10).tolist():
        if STEPS / 4 < finish(diffuse, with_limit(state, limit)).values[SKIPPED_STEPS] < STEPS / 2:
            return limit
    raise AssertionError("no such limit")


def load_denoiser(folder: Path) -> SDXLAdapter:
    adapter = load_stage(folder, Stage.DIFFUSE)
    assert isinstance(adapter, SDXLAdapter)
    return adapter


def test_requests_of_other_sizes_and_qualities_change_nothing(model: Model) -> None:
    """In packed steps: one is exact, one begins later, two are of one size, and one has two outputs and no guidance."""
    folder = model("sdxl")
    diffuse = load_denoiser(folder)
    exact, late, two, like = (
        begin(folder, 128, 192, seed=1),
        begin(folder, 256, 128, seed=2),
        begin(folder, 128, 128, seed=3, num_outputs=2, guidance_scale=1.0),
        begin(folder, 256, 128, seed=4),
    )
    limit = find_limit(diffuse, late)
    late = diffuse.step(diffuse.step(with_limit(late, limit)))
    members = [exact, late, with_limit(two, 3 * limit), with_limit(like, 2 * limit)]
    alone = [finish(diffuse, member) for member in members]
    assert len({diffuse.pack_key(member) for member in members}) == 1
    running = dict(enumerate(members))
    while running:
        running = dict(zip(running, diffuse.advance(list(running.values())), strict=True))
        for index in [index for index, state in running.items() if state.step == state.num_steps]:
            assert_same(running.pop(index), alone[index])
    skipped = [state.values[SKIPPED_STEPS] for state in alone]
    assert skipped[0] == 0 < min(skipped[1:])


def test_a_request_that_moves_at_every_step_is_what_it_is_where_it_stays(model: Model) -> None:
    """To another adapter, with nothing but its tensors and values."""
    folder = model("sdxl")
    here, there = load_denoiser(folder), load_adapter(folder, frozenset({Stage.DIFFUSE}))
    state = begin(folder, 128, 192)
    state = with_limit(state, find_limit(here, state))
    expected = finish(here, state)
    for step in range(STEPS):
        moved = {name: tensor.clone() for name, tensor in state.tensors.items()}
        before = dict(moved)
        state = (there, here)[step % 2].step(replace(state, tensors=moved))
        assert all(torch.equal(tensor, before[name]) for name, tensor in moved.items()), "a step changes no state"
    assert torch.equal(state.tensors["latents"], expected.tensors["latents"])
    assert state.values == expected.values


def test_an_exact_request_gets_the_bits_of_a_model_that_never_reused_anything(model: Model) -> None:
    folder, state = model("sdxl"), begin(model("sdxl"), 128, 128)
    diffuse, fresh = load_denoiser(folder), load_adapter(folder, frozenset({Stage.DIFFUSE}))
    diffuse.step(with_limit(state, 1.0))
    assert torch.equal(finish(diffuse, state).tensors["latents"], finish(fresh, state).tensors["latents"])


def test_high_and_fast_skip_patches_of_real_steps(model: Model) -> None:
    """The steps, limits and predictor that come with the family, from the prompt to the pixels."""
    folder = model("sdxl")
    whole = load_adapter(folder, frozenset(Stage))
    skipped, pixels = [], []
    for quality in ("exact", "high", "fast"):
        inputs = make_inputs(128, 128, FAMILIES["sdxl"].default_steps, quality=quality, variant="sdxl")
        state = finish(whole, whole.prepare(whole.encode(inputs), inputs))
        skipped.append(state.values[SKIPPED_STEPS] / state.num_steps)
        pixels.append(torch.from_numpy(whole.decode(whole.latents(state), inputs)).double())
    assert skipped[0] == 0 < skipped[1] < skipped[2] < 1
    errors = [float((made - pixels[0]).square().mean()) for made in pixels[1:]]
    assert 0 < errors[0] < errors[1] < 100


def test_patches_that_are_computed_are_what_they_are_beside_those_that_are_not() -> None:
    """A stack whose kept tensors are given: blocks see, of other patches, what these take over."""
    torch.manual_seed(0)
    rows, blocks, channels, height, width = 3, 2, 32, 8, 12
    stack = Transformer2DModel(
        2,
        16,
        in_channels=channels,
        num_layers=blocks,
        cross_attention_dim=8,
        norm_num_groups=4,
        use_linear_projection=True,
    ).eval()
    tokens, text = torch.randn(rows, height * width, channels), torch.randn(rows, 5, 8)
    grid = PatchGrid(2, 3)
    patches = grid.list_tokens(height, width)
    reused = torch.tensor([[1, 0, 0, 1, 0, 0], [1, 1, 1, 1, 0, 1], [0] * 6], dtype=torch.bool)
    entering = tokens.clone()
    for row, patch in (~reused).nonzero().tolist():
        entering[row, patches[patch]] += 5
    kept = KeptStack(entering, torch.randn(rows, blocks, height * width, channels))
    known = (entering.clone(), kept.added.clone())
    limits = torch.full((rows, 1), 0.5, dtype=torch.float64)
    one = PatchPass(PassRows(grid, limits, limits, limits > 0), {0: kept}, PLAIN)
    computed = torch.ones(rows, height * width, dtype=torch.bool)
    for row, patch in reused.nonzero().tolist():
        computed[row, patches[patch]] = False
    with torch.no_grad():
        found = one.compute(0, 0.0, stack.transformer_blocks, tokens, text, height)
        expected = tokens
        for number, block in enumerate(stack.transformer_blocks):
            whole = block(expected, encoder_hidden_states=text)
            expected = torch.where(computed[..., None], whole, expected + known[1][:, number])
    assert (found - expected).abs().max() <= 1e-5
    assert torch.equal(one.skipped[0], reused.double().mean(1))
    after = one.after[0]
    assert torch.equal(after.entering, torch.where(computed[..., None], tokens, known[0]))
    assert torch.equal(after.added[:, 0][~computed], known[1][:, 0][~computed])
    assert (tokens + after.added.sum(1) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("height", "width", "levels", "grid"),
    [
        (128, 128, 3, (8, 8)),
        (64, 96, 3, (4, 6)),
        (104, 152, 3, (13, 19)),
        (4, 6, 2, (2, 3)),
        (66, 64, 3, (1, 1)),
        (9, 8, 3, (1, 1)),
    ],
)
def test_the_grid_is_one_for_each_size(height: int, width: int, levels: int, grid: tuple[int, int]) -> None:
    chosen = PatchGrid.choose((1, 4, height, width), levels)
    assert chosen == grid
    for level in range(levels):
        high, wide = -(-height // 2**level), -(-width // 2**level)
        tokens = chosen.list_tokens(high, wide)
        assert sorted(tokens.flatten().tolist()) == list(range(high * wide))
        rows, columns = tokens[0] // wide, tokens[0] % wide
        assert (rows.max() + 1, columns.max() + 1) == (high // grid[0], wide // grid[1])


def test_a_size_that_cannot_be_cut_decides_as_a_whole(model: Model) -> None:
    folder = model("sdxl")
    diffuse, state = load_denoiser(folder), begin(folder, 72, 56)
    state = diffuse.step(with_limit(state, 0.3))
    made = diffuse.step(state)
    stacks = 4
    assert (made.values[SKIPPED_STEPS] - state.values[SKIPPED_STEPS]) * 2 * stacks in range(2 * stacks + 1)
    careless = finish(diffuse, with_limit(state, 1e9))
    assert careless.values[SKIPPED_STEPS] == STEPS - 1


def test_a_request_that_would_keep_too_much_is_computed_whole(model: Model) -> None:
    folder = model("sdxl")
    diffuse = load_adapter(folder, frozenset({Stage.DIFFUSE}))
    condition = load_stage(folder, Stage.ENCODE).encode(make_inputs(variant="sdxl"))
    inputs = make_inputs(64, 64, quality="fast", variant="sdxl")
    kept = diffuse.step(diffuse.prepare(condition, inputs)).tensors
    kept_bytes = sum(tensor.nbytes for name, tensor in kept.items() if name.startswith("cache."))
    for max_bytes, limit in ((kept_bytes, StepCache().find_patch_limit("fast")), (kept_bytes - 1, 0.0)):
        diffuse.step_cache = StepCache(max_bytes=max_bytes)
        assert diffuse.prepare(condition, inputs).values[CACHE_LIMIT] == limit


def test_u_nets_of_other_blocks_are_refused(model: Model) -> None:
    diffuse: Any = load_adapter(model("sdxl"), frozenset({Stage.DIFFUSE}))
    unet, state = diffuse.pipe.unet, begin(model("sdxl"), 64, 64)
    attention = unet.mid_block.attentions[0]
    attention.transformer_blocks[0].norm_type = "ada_norm"
    with pytest.raises(ConfigError, match="patches of Transformer2DModel cannot be used again"):
        install_reuse(unet)
    attention.transformer_blocks[0].norm_type = "layer_norm"
    diffuse.step(with_limit(state, 1.0))
    hidden, text = torch.randn(1, 64, 4, 4), torch.randn(1, 3, 64)
    with use_patch_passes([]), pytest.raises(ConfigError, match="cannot be used again with attention_mask"):
        attention(hidden, encoder_hidden_states=text, attention_mask=torch.ones(1, 16))
