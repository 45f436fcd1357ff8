"""Training of the transformer and of the text encoders, together, by flow matching on prepared latents."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lib.default_model import words
from lib.default_model.architecture import TEXT_TOKENS, count_image_tokens
from lib.default_model.latents import SIZES, SMALL_PIXELS, WORDINGS, PreparedPictures, load_pictures
from lib.default_model.noise_levels import choose_shift
from lib.default_model.pipeline import ModelParts, build_parts, measure_latents, save_grid
from lib.training.flow import add_noise, compute_weighted_error
from lib.training.optimizers import build_optimizers
from lib.training.precision import compute_fast
from lib.training.processes import count_processes, get_rank
from lib.training.runs import TrainingRun, TrainingSetup
from lib.training.seeds import derive_seed
from lib.training.shards import tokenize

_CAPTION_DROPOUT = 0.1
# Shapes with many corners are learned last: pictures of them are drawn so many times as often as others.
_HARD_SHAPES, _HARD_TIMES = ("star", "cross"), 3.0


@dataclass(frozen=True)
class PictureBatch:
    """One step's pictures, all of one size."""

    latents: torch.Tensor
    clip_ids: torch.Tensor
    t5_ids: torch.Tensor

    def move(self, device: torch.device) -> PictureBatch:
        """The same on a device."""
        return PictureBatch(self.latents.to(device), self.clip_ids.to(device), self.t5_ids.to(device))


def train_denoiser(folder: Path, setup: TrainingSetup) -> None:
    """Train as it is set up. Processes that train together share the tokens of a step.

    State, figures and grids of samples lie in `folder` as `denoiser*`.
    """
    torch.manual_seed(derive_seed(setup.seed, "denoiser"))
    batch_tokens = setup.batch_tokens // count_processes()
    prepared = load_pictures(folder)
    scale = 1 / measure_latents(folder, prepared)
    parts = build_parts(folder).move(setup.device)
    run = TrainingRun(folder, "denoiser", parts.trained(), build_optimizers(parts.trained().values(), setup.peak_rate))
    weights = {size: weigh_pictures(pictures, parts.tokenizer_3) for size, pictures in prepared.items()}
    empty = tuple(tokenize(each, [""], TEXT_TOKENS)[0] for each in (parts.tokenizer, parts.tokenizer_3))
    if setup.compiles:
        parts.transformer.compile(dynamic=False)
    for step in run.iterate(setup.steps):
        torch.manual_seed(derive_seed(setup.seed, "step", step, get_rank()))
        is_any = step / setup.steps >= setup.small_share
        size = draw_size(random.Random(derive_seed(setup.seed, "size", step)), is_any)
        rows = -(-batch_tokens // (count_image_tokens(*size) + 2 * TEXT_TOKENS))
        batch = _draw_batch(prepared[size], weights[size], rows, empty).move(setup.device)
        with compute_fast(setup.device):
            loss = compute_loss(parts, batch.latents.float() * scale, batch)
        norm = run.learn(loss, setup.plan_rate(step))
        run.average(0.996)
        if step % 10 == 0:
            run.log(loss=loss.item(), norm=norm, side=(size[0] * size[1]) ** 0.5)
        if (step + 1) % setup.grid_every == 0 and get_rank() == 0:
            save_grid(folder, parts.replaced(run.averages), folder / f"denoiser-{step + 1:06d}.png")


def draw_size(rng: random.Random, is_any: bool) -> tuple[int, int]:
    """Draw the (width, height) of a step's pictures, of the small sizes or of any."""
    sizes = [size for size in SIZES if is_any or size[0] * size[1] <= SMALL_PIXELS]
    return rng.choices(sizes, [SIZES[size][1] for size in sizes])[0]


def weigh_pictures(pictures: PreparedPictures, tokenizer: Any) -> torch.Tensor:
    """Frequencies with which pictures are drawn, relative to each other (n,), by the T5 tokens of their captions."""
    nouns = [noun for shape in _HARD_SHAPES for noun in words.SHAPES[shape]]
    pieces = [f"▁{word}" for noun in nouns for word in (noun, words.plural(noun))]
    hard = torch.tensor(tokenizer.convert_tokens_to_ids(pieces))
    return torch.isin(pictures.t5_ids, hard).flatten(1).any(1) * (_HARD_TIMES - 1) + 1


def compute_loss(parts: ModelParts, latents: torch.Tensor, batch: PictureBatch) -> torch.Tensor:
    """The error of the velocity (`compute_weighted_error`), at noise levels that are drawn here."""
    noisy = add_noise(latents, choose_shift(*latents.shape[-2:]))
    embeds, pooled = parts.encode(batch.clip_ids, batch.t5_ids)
    velocity = parts.transformer(
        hidden_states=noisy.latents,
        timestep=noisy.timesteps,
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        return_dict=False,
    )[0]
    return compute_weighted_error(velocity, noisy, latents)


def _draw_batch(
    prepared: PreparedPictures, weights: torch.Tensor, rows: int, empty: tuple[torch.Tensor, ...]
) -> PictureBatch:
    index = torch.multinomial(weights, rows, replacement=True)
    wording = torch.randint(WORDINGS, (rows,))
    dropped = (torch.rand(rows) < _CAPTION_DROPOUT)[:, None]
    clip_ids = torch.where(dropped, empty[0], prepared.clip_ids[index, wording].long())
    t5_ids = torch.where(dropped, empty[1], prepared.t5_ids[index, wording].long())
    return PictureBatch(prepared.latents[index], clip_ids, t5_ids)
