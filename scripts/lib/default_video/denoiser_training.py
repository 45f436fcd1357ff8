"""Training of the video transformer by flow matching on prepared latents, after that of its text encoder."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from lib.default_video.architecture import MOTION_SHIFT, TEXT_TOKENS, count_clip_tokens
from lib.default_video.clips import FRAMES
from lib.default_video.latents import CLIP_SIZES, CLIP_WORDINGS, load_clips
from lib.default_video.pipeline import VideoParts, build_parts, measure_latents, save_strips, shorten_captions
from lib.default_video.reading import teach_reading
from lib.training.flow import add_noise, compute_error
from lib.training.optimizers import build_optimizers
from lib.training.precision import compute_fast
from lib.training.processes import count_processes, get_rank
from lib.training.runs import TrainingRun, TrainingSetup
from lib.training.seeds import derive_seed
from lib.training.shards import PixelSize, tokenize

_CAPTION_DROPOUT = 0.1
# The share of smaller clips once there are larger ones.
_SMALLER = 0.4
# Captions that are read have so many times fewer tokens in a step than clips.
_READING_SHARE = 2


def train_denoiser(folder: Path, setup: TrainingSetup) -> None:
    """Train as it is set up, after the text encoder has learned to read. Processes that train together share the tokens
    of a step.

    State, figures and strips of samples lie in `folder` as `denoiser*`.
    """
    torch.manual_seed(derive_seed(setup.seed, "denoiser"))
    batch_tokens = setup.batch_tokens // count_processes()
    prepared = load_clips(folder)
    mean, deviation = measure_latents(folder, prepared)
    parts = build_parts(folder).move(setup.device)
    run = TrainingRun(folder, "denoiser", parts.trained(), build_optimizers(parts.trained().values(), setup.peak_rate))
    if run.step == 0:
        captions = torch.cat([clips.ids.flatten(0, 1) for clips in prepared.values()])
        number = max(1, batch_tokens // TEXT_TOKENS // _READING_SHARE)
        steps = setup.reading_steps
        if not teach_reading(folder, parts.text_encoder, parts.tokenizer, captions, setup.seed, steps, number):
            return
        run.restart_average("text_encoder")
    # A transformer that does not use the order of words yet drives the encoder to leave it out.
    parts.text_encoder.requires_grad_(False)
    shorten_captions(parts.transformer)
    empty = tokenize(parts.tokenizer, [""], TEXT_TOKENS)[0]
    if setup.compiles:
        parts.transformer.compile(dynamic=False)
    for step in run.iterate(setup.steps):
        torch.manual_seed(derive_seed(setup.seed, "step", step, get_rank()))
        is_any = step / setup.steps >= setup.small_share
        size = draw_clip_size(random.Random(derive_seed(setup.seed, "size", step)), is_any)
        rows = max(1, batch_tokens // (count_clip_tokens(*size, FRAMES) + TEXT_TOKENS))
        index, wording = torch.randint(len(prepared[size].ids), (rows,)), torch.randint(CLIP_WORDINGS, (rows,))
        dropped = (torch.rand(rows) < _CAPTION_DROPOUT)[:, None]
        ids = torch.where(dropped, empty, prepared[size].ids[index, wording].long())
        latents = (prepared[size].latents[index].float() - mean) / deviation
        with compute_fast(setup.device):
            loss = compute_motion_loss(parts, latents.to(setup.device), ids.to(setup.device))
        norm = run.learn(loss, setup.plan_rate(step))
        run.average(0.996)
        if step % 10 == 0:
            run.log(loss=loss.item(), norm=norm, side=size[0])
        if (step + 1) % setup.grid_every == 0 and get_rank() == 0:
            save_strips(folder, parts.replaced(run.averages), folder / f"denoiser-{step + 1:06d}.png")


def draw_clip_size(rng: random.Random, is_any: bool) -> PixelSize:
    """Draw the (width, height) of a step's clips, of the smaller size or of any."""
    smaller, larger = CLIP_SIZES
    return larger if is_any and rng.random() >= _SMALLER else smaller


def compute_motion_loss(parts: VideoParts, latents: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The error of the velocity (`compute_error`), at noise levels that are drawn here."""
    noisy = add_noise(latents, MOTION_SHIFT)
    velocity = parts.transformer(
        hidden_states=noisy.latents,
        timestep=noisy.timesteps,
        encoder_hidden_states=parts.encode(ids),
        return_dict=False,
    )[0]
    return compute_error(velocity, noisy)
