"""The default video model as a whole: its parts while they are trained, and the diffusers pipeline that they make."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from PIL import Image

from lib.default_video import architecture
from lib.default_video.architecture import LATENT_CHANNELS, MOTION_SHIFT, PIPELINE_TOKENS, TEXT_TOKENS
from lib.default_video.clips import FRAMES
from lib.default_video.latents import PreparedClips
from lib.default_video.vae_training import load_vae
from lib.training.parts import TrainedParts
from lib.training.shards import PixelSize
from tridentserve.pipelines.loading import load_adapter
from tridentserve.stages import Stage

STRIP_PROMPTS = (
    "a red circle moving to the right",
    "a green star moving up on a black background",
    "a yellow square moving to the left and a blue heart moving down on a gray background",
    "an orange triangle moving down and a purple cross moving to the left on a beige background",
)
STRIP_SIDE, STRIP_STEPS, STRIP_GUIDANCE = 96, 16, 4.0


@dataclass(frozen=True)
class VideoParts(TrainedParts):
    """The parts that the transformer's training needs. The VAE is trained before and only used here."""

    NAMES = ("transformer", "text_encoder")

    transformer: Any
    text_encoder: Any
    tokenizer: Any

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        """Encode tokens (n, TEXT_TOKENS) as Wan's pipeline does, with one row of zeros for all its further ones.

        Returns (n, TEXT_TOKENS + 1, dim); `FilledAttention` gives the last row the weight of those it stands for.
        """
        mask = ids != self.tokenizer.pad_token_id
        embeds: torch.Tensor = self.text_encoder(ids, mask.long()).last_hidden_state * mask[..., None]
        return torch.cat([embeds, embeds.new_zeros(len(embeds), 1, embeds.shape[-1])], 1)


class FilledAttention(WanAttnProcessor):  # type: ignore[misc]
    """Attention to a caption of few tokens as if it were filled up with zeros to `PIPELINE_TOKENS`.

    All rows of zeros have one key and one value: one of them, whose logit is raised by the logarithm of their number,
    has the weight of all, at a twentieth of the cost.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._raised = torch.zeros(1, 1, 1, TEXT_TOKENS + 1, device=device)
        self._raised[..., -1] = math.log(PIPELINE_TOKENS - TEXT_TOKENS)

    def __call__(self, attn: Any, hidden_states: Any, encoder_hidden_states: Any, *_: Any) -> Any:
        """Attend; the mask and positions that other attention has are not used here."""
        return super().__call__(attn, hidden_states, encoder_hidden_states, self._raised)


def shorten_captions(transformer: Any) -> None:
    """Have a transformer take captions as `VideoParts.encode` encodes them, on the device where it is."""
    for block in transformer.blocks:
        block.attn2.set_processor(FilledAttention(transformer.device))


def build_parts(folder: Path) -> VideoParts:
    """New parts with random weights, and the tokenizer of the run, which is built once and kept in `folder`."""
    path = folder / "tokenizer"
    if not path.is_dir():
        architecture.build_tokenizer().save_pretrained(path)
    tokenizer = transformers.T5TokenizerFast.from_pretrained(path)
    return VideoParts(architecture.build_transformer(), architecture.build_text_encoder(tokenizer), tokenizer)


def measure_latents(folder: Path, prepared: Mapping[PixelSize, PreparedClips]) -> torch.Tensor:
    """The mean and the standard deviation of the latents over all channels, measured once per run: (2,)."""
    path = folder / "latent_statistics.pt"
    if not path.exists():
        latents = list(prepared.values())[-1].latents[:2000].float()
        written = path.with_suffix(f".{os.getpid()}")
        torch.save(torch.stack([latents.mean(), latents.std()]), written)
        written.replace(path)
    statistics: torch.Tensor = torch.load(path, weights_only=True)
    return statistics


def assemble_pipeline(folder: Path, parts: VideoParts) -> Any:
    """Put the pipeline together, with the VAE as it was trained and the scale of its latents in its configuration."""
    vae = load_vae(folder)
    mean, deviation = torch.load(folder / "latent_statistics.pt", weights_only=True).tolist()
    vae.register_to_config(latents_mean=[mean] * LATENT_CHANNELS, latents_std=[deviation] * LATENT_CHANNELS)
    return diffusers.WanPipeline(
        tokenizer=parts.tokenizer,
        text_encoder=parts.text_encoder,
        transformer=parts.transformer,
        vae=vae,
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=MOTION_SHIFT
        ),
    )


def load_pipeline(model: Path) -> Any:
    """Load a model folder that `export` wrote as diffusers' own pipeline, in single precision.

    The package reads the weights: without accelerate diffusers itself does not load Wan. Raises `ModelFolderError`.
    """
    adapter: Any = load_adapter(model, frozenset(Stage))
    return adapter.pipe


@torch.no_grad()
def save_strips(folder: Path, parts: VideoParts, path: Path) -> None:
    """Make one clip of each of `STRIP_PROMPTS`, where the parts are, and save every fourth frame of each in a row."""
    pipe = assemble_pipeline(folder, parts).to(parts.transformer.device)
    pipe.set_progress_bar_config(disable=True)
    clips = pipe(
        list(STRIP_PROMPTS),
        height=STRIP_SIDE,
        width=STRIP_SIDE,
        num_frames=FRAMES,
        num_inference_steps=STRIP_STEPS,
        guidance_scale=STRIP_GUIDANCE,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
    ).frames
    frames = (np.asarray(clips)[:, ::4] * 255).round().astype(np.uint8)
    framed = np.pad(frames, ((0, 0), (0, 0), (0, 4), (0, 4), (0, 0)), constant_values=128)
    Image.fromarray(np.concatenate([np.concatenate(list(clip), 1) for clip in framed], 0)).save(path)
