"""The default model as a whole: its parts while they are trained, and the diffusers pipeline that they make."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from PIL import Image
from torch.nn import functional

from lib.default_model import architecture
from lib.default_model.architecture import TEXT_TOKENS
from lib.default_model.latents import PreparedPictures
from lib.default_model.noise_levels import make_scheduler
from lib.default_model.vae_training import load_vae
from lib.training.parts import TrainedParts
from lib.training.shards import PixelSize

GRID_PROMPTS = (
    "a red circle above a blue square",
    "a green star on a black background",
    "three yellow hearts on gray",
    "a purple triangle to the left of an orange cross",
    "a large pink heart in the middle, beige background",
    "a white square below a black circle on a light blue background",
    "two small blue crosses on white",
    "an orange triangle in the top left corner",
)
GRID_SIDE, GRID_STEPS, GRID_GUIDANCE = 128, 20, 4.0


@dataclass(frozen=True)
class ModelParts(TrainedParts):
    """The parts that the transformer's training needs. The VAE is trained before and only used here."""

    NAMES = ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3")

    transformer: Any
    text_encoder: Any
    text_encoder_2: Any
    text_encoder_3: Any
    tokenizer: Any
    """That of both CLIPs."""
    tokenizer_3: Any

    def encode(self, clip_ids: torch.Tensor, t5_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode tokens as `StableDiffusion3Pipeline.encode_prompt` does: (n, tokens, joint dim), (n, pooled dim)."""
        clips = [encoder(clip_ids, output_hidden_states=True) for encoder in (self.text_encoder, self.text_encoder_2)]
        clip = torch.cat([output.hidden_states[-2] for output in clips], -1)
        t5 = self.text_encoder_3(t5_ids)[0]
        embeds = torch.cat([functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1])), t5], -2)
        return embeds, torch.cat([output[0] for output in clips], -1)


def build_parts(folder: Path) -> ModelParts:
    """New parts with random weights, and the tokenizers of the run, which are built once and kept in `folder`."""
    tokenizer, tokenizer_3 = load_tokenizers(folder)
    return ModelParts(
        transformer=architecture.build_transformer(),
        text_encoder=architecture.build_clip_encoder(tokenizer),
        text_encoder_2=architecture.build_clip_encoder(tokenizer),
        text_encoder_3=architecture.build_t5_encoder(tokenizer_3),
        tokenizer=tokenizer,
        tokenizer_3=tokenizer_3,
    )


def load_tokenizers(folder: Path) -> tuple[Any, Any]:
    """The tokenizers of a run, CLIP's and T5's. They are built when the run begins: equal words may be merged in
    another order another time."""
    paths = folder / "tokenizer", folder / "tokenizer_3"
    if not paths[1].is_dir():
        architecture.build_clip_tokenizer().save_pretrained(paths[0])
        architecture.build_t5_tokenizer().save_pretrained(paths[1])
    return transformers.CLIPTokenizer.from_pretrained(paths[0]), transformers.T5TokenizerFast.from_pretrained(paths[1])


def measure_latents(folder: Path, prepared: Mapping[PixelSize, PreparedPictures]) -> torch.Tensor:
    """The standard deviation of the latents over all channels, measured once per run.

    Channels keep their proportions: those that vary little matter little to the picture, and with a deviation of 1 each
    they were most of the loss.
    """
    path = folder / "latent_deviation.pt"
    if not path.exists():
        written = path.with_suffix(f".{os.getpid()}")
        torch.save(prepared[128, 128].latents[:4000].float().std(), written)
        written.replace(path)
    deviation: torch.Tensor = torch.load(path, weights_only=True)
    return deviation


def assemble_pipeline(folder: Path, parts: ModelParts) -> Any:
    """Put the pipeline together, with the VAE as it was trained and the factor of its latents in its configuration."""
    vae = load_vae(folder)
    deviation = torch.load(folder / "latent_deviation.pt", weights_only=True)
    vae.register_to_config(scaling_factor=1 / deviation.item(), shift_factor=0.0)
    return diffusers.StableDiffusion3Pipeline(
        transformer=parts.transformer,
        scheduler=make_scheduler(),
        vae=vae,
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        text_encoder_2=parts.text_encoder_2,
        tokenizer_2=parts.tokenizer,
        text_encoder_3=parts.text_encoder_3,
        tokenizer_3=parts.tokenizer_3,
    )


@torch.no_grad()
def save_grid(folder: Path, parts: ModelParts, path: Path) -> None:
    """Make one picture of each of `GRID_PROMPTS`, where the parts are, and save them side by side, in two rows."""
    pipe = assemble_pipeline(folder, parts).to(parts.transformer.device)
    pipe.set_progress_bar_config(disable=True)
    images = pipe(
        list(GRID_PROMPTS),
        height=GRID_SIDE,
        width=GRID_SIDE,
        num_inference_steps=GRID_STEPS,
        guidance_scale=GRID_GUIDANCE,
        max_sequence_length=TEXT_TOKENS,
        generator=torch.Generator().manual_seed(1),
    ).images
    columns = (len(images) + 1) // 2
    grid = Image.new("RGB", (columns * (GRID_SIDE + 4), 2 * (GRID_SIDE + 4)), "magenta")
    for index, image in enumerate(images):
        grid.paste(image, (index % columns * (GRID_SIDE + 4), index // columns * (GRID_SIDE + 4)))
    grid.save(path)
