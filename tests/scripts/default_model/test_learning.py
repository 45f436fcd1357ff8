"""How the default model learns: the optimizer of its matrices, and the order of sizes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from lib.default_model.architecture import TEXT_TOKENS
from lib.default_model.denoiser_training import draw_size, weigh_pictures
from lib.default_model.export import begin_from_model
from lib.default_model.latents import SIZES, SMALL_PIXELS, PreparedPictures
from lib.default_model.noise_levels import choose_shift, make_scheduler
from lib.default_model.pipeline import build_parts, load_tokenizers
from lib.training.flow import add_noise, compute_error, compute_weighted_error, weigh_places
from lib.training.model_folder import count_earlier_steps
from lib.training.muon import MatrixOptimizer, orthogonalize
from lib.training.precision import compute_fast
from lib.training.runs import load_averages
from lib.training.shards import tokenize
from safetensors.torch import load_file
from torch.nn import functional

from tridentserve.device import find_device
from tridentserve.models.model_folder import find_shipped_model


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_orthogonal_updates_keep_singular_vectors(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    matrices = torch.randn(3, *shape)
    for matrix, result in zip(matrices, orthogonalize(matrices), strict=True):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        inner = left.T @ result @ right.T
        strong = values > 0.05 * values.max()
        assert ((inner.diagonal() > 0.3) & (inner.diagonal() < 1.5))[strong].all()
        limit = 0.05 if find_device("cpu").multiplies_bfloat16 else 1e-4
        assert (inner - inner.diagonal().diag()).abs().max() < limit


def test_matrices_learn_a_linear_map() -> None:
    torch.manual_seed(2)
    target, weight = torch.randn(6, 10), torch.nn.Parameter(torch.zeros(6, 10))
    optimizer = MatrixOptimizer([weight], lr=0.1)
    losses = []
    for _ in range(100):
        loss = (weight - target).square().mean()
        losses.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.2 * losses[0]


def test_fast_computing_changes_results_a_little_and_no_precision_of_weights() -> None:
    torch.manual_seed(4)
    layer, rows = torch.nn.Linear(64, 64), torch.randn(2, 4, 10, 64)
    with compute_fast(torch.device("cpu")):
        fast = functional.scaled_dot_product_attention(layer(rows), layer(rows), layer(rows))
    fast.float().square().mean().backward()  # type: ignore[no-untyped-call]
    assert layer.weight.grad is not None
    assert {layer.weight.dtype, layer.weight.grad.dtype} == {torch.float32}
    exact = functional.scaled_dot_product_attention(layer(rows), layer(rows), layer(rows))
    torch.testing.assert_close(fast.float(), exact, rtol=0.05, atol=0.05)


def test_errors_where_a_thing_is_count_more() -> None:
    latents = torch.zeros(2, 3, 5, 6, 6) + torch.arange(5.0).view(5, 1, 1)  # frames whose backgrounds differ
    latents[1, :, 2, 1:3, 4] += 9.0
    weights = weigh_places(latents)
    assert weights.shape == (2, 1, 5, 6, 6)
    torch.testing.assert_close(weights.mean(), torch.tensor(1.0))
    assert (weights > 2 * weights.min()).nonzero().tolist() == [[1, 0, 2, 1, 4], [1, 0, 2, 2, 4]]
    noisy = add_noise(latents)
    assert compute_weighted_error(noisy.velocity, noisy, latents) == 0
    wrong = noisy.velocity.clone()
    wrong[1, 0, 2, 1, 4] += 1.0
    at_thing = compute_weighted_error(wrong, noisy, latents)
    wrong[1, 0, 2, 1, 4] -= 1.0
    wrong[0, 0, 0, 0, 0] += 1.0
    torch.testing.assert_close(
        at_thing / compute_weighted_error(wrong, noisy, latents), torch.tensor(4.0), rtol=1e-3, atol=0
    )


def test_a_plain_error_is_the_same_everywhere() -> None:
    noisy = add_noise(torch.randn(4, 3, 6, 6))
    assert compute_error(noisy.velocity, noisy) == 0
    torch.testing.assert_close(compute_error(noisy.velocity + 0.5, noisy), torch.tensor(0.25))


@pytest.mark.parametrize(("side", "shift"), [(128, 3.0), (256, 6.0), (64, 2.25), (192, 4.25)])
def test_training_and_scheduler_have_the_same_noise_levels(side: int, shift: float) -> None:
    """Of pictures of this side: as the stock pipeline sets its timesteps."""
    assert choose_shift(side // 8, side // 8) == pytest.approx(shift)
    scheduler = make_scheduler()
    mu = calculate_shift(
        (side // 16) ** 2,
        scheduler.config.base_image_seq_len,
        scheduler.config.max_image_seq_len,
        scheduler.config.base_shift,
        scheduler.config.max_shift,
    )
    scheduler.set_timesteps(4, mu=mu)
    even = torch.tensor(sorted(float(sigma) for sigma in scheduler.sigmas[:-1]))
    unshifted = even / (shift - (shift - 1) * even)
    torch.testing.assert_close(unshifted, torch.linspace(float(unshifted[0]), 1.0, 4), atol=1e-3, rtol=0)


def test_sizes_are_small_or_any() -> None:
    rng = random.Random(3)
    early = {draw_size(rng, is_any=False) for _ in range(500)}
    assert {width * height <= SMALL_PIXELS for width, height in early} == {True}
    assert {draw_size(rng, is_any=True) for _ in range(2000)} == set(SIZES)


def test_pictures_of_shapes_with_many_corners_are_drawn_more_often(tmp_path: Path) -> None:
    tokenizers = load_tokenizers(tmp_path)
    captions = ["a red circle", "three blue stars on white", "a square above a pink plus", "a box"]
    clip_ids, t5_ids = (tokenize(each, captions, TEXT_TOKENS)[:, None].short() for each in tokenizers)
    pictures = PreparedPictures(torch.zeros(4, 8, 2, 2), clip_ids, t5_ids)
    assert weigh_pictures(pictures, tokenizers[1]).tolist() == [1, 3, 3, 1]


def test_a_run_that_begins_from_a_model_has_its_weights_and_its_history(tmp_path: Path) -> None:
    model = find_shipped_model("shapes")
    begin_from_model(tmp_path, model, vae_steps=5)
    parts = build_parts(tmp_path)
    assert load_averages(tmp_path, "denoiser", parts.trained()) == 0
    weights = load_file(model / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, value in parts.transformer.state_dict().items():
        assert torch.equal(value, weights.get(name, value).float()), name
    assert count_earlier_steps(tmp_path)["steps"] == json.loads((model / "training.json").read_text())["steps"]
    (tmp_path / "denoiser.pt").write_bytes(b"of this run")
    begin_from_model(tmp_path, model, vae_steps=5)  # a run that has begun stays as it is
    assert (tmp_path / "denoiser.pt").read_bytes() == b"of this run"
