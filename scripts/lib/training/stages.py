"""The stages in which the default models are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lib.default_model import denoiser_training, export, latents, pipeline, vae_training
from lib.default_video import denoiser_training as video_denoiser_training
from lib.default_video import export as video_export
from lib.default_video import latents as video_latents
from lib.default_video import pipeline as video_pipeline
from lib.default_video import vae_training as video_vae_training
from lib.training.runs import TrainingSetup


@dataclass(frozen=True)
class TrainingStages:
    """The stages of one kind of model. All states lie in the run's folder, which each takes first."""

    begin: Callable[[Path, Path, int], None]
    """(folder, model, VAE steps): write states with the weights of a model folder, where the run has not begun."""
    train_vae: Callable[[Path, int, int, torch.device], None]
    """(folder, seed, steps, device)."""
    prepare: Callable[[Path, int, float, int, torch.device], None]
    """(folder, seed, scale of the data set, samples in each file, device)."""
    train_denoiser: Callable[[Path, TrainingSetup], None]
    """(folder, setup)."""
    export: Callable[[Path, Path], None]
    """(folder, target): write the model folder."""


def _prepare_pictures(folder: Path, seed: int, scale: float, number: int, device: torch.device) -> None:
    latents.prepare_latents(folder, seed, scale, number, pipeline.load_tokenizers(folder), device)


def _prepare_clips(folder: Path, seed: int, scale: float, number: int, device: torch.device) -> None:
    video_latents.prepare_clips(folder, seed, scale, number, video_pipeline.build_parts(folder).tokenizer, device)


IMAGE_STAGES = TrainingStages(
    export.begin_from_model,
    vae_training.train_vae,
    _prepare_pictures,
    denoiser_training.train_denoiser,
    export.export_model,
)
VIDEO_STAGES = TrainingStages(
    video_export.begin_from_model,
    video_vae_training.train_vae,
    _prepare_clips,
    video_denoiser_training.train_denoiser,
    video_export.export_model,
)
