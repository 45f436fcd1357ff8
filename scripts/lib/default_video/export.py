"""The trained default video model as a model folder, with its card; and a run that begins from one."""

from __future__ import annotations

from pathlib import Path

import torch

from lib.default_model import words
from lib.default_video.clips import FRAMES
from lib.default_video.latents import CLIP_SIZES
from lib.default_video.motion import DIRECTIONS
from lib.default_video.pipeline import VideoParts, assemble_pipeline, build_parts, load_pipeline
from lib.training.model_folder import has_begun, write_model, write_states

_CARD = f"""\
# The default video model of TridentServe

A small text-to-video model with the parts of Wan 2.1, for prompts such as "a red circle moving to the right on a \
white background" and a service without any download. It was trained by `scripts/train_default_model.py --video` of \
this repository, on clips that the script draws itself, and knows nothing else. `docs/default-model.md` says how good \
it is.

- **Made on** {{date}}, with torch {{torch}} and diffusers {{diffusers}}; {{steps:,}} steps of the transformer, \
{{vae_steps:,}} of the VAE. All files have {{size_mb:.1f}} MB (half precision; the service computes in the precision \
that it is told).
- **Data**: {{samples:,}} clips of one or two shapes that move on a plain background, {FRAMES} frames each, with four \
wordings of what they show. One in sixteen of the combinations of shapes, colors and directions was never trained on; \
the judge (`scripts/judge.py`) asks for these.
- **Words**: {", ".join(words.SHAPES)}; {", ".join(words.COLORS)}; small, medium; moving {", ".join(DIRECTIONS)}; \
backgrounds {", ".join(words.BACKGROUNDS)}. Other words are spelled by the tokenizer and mean nothing to the model.
- **Sizes**: {", ".join(f"{width} x {height}" for width, height in CLIP_SIZES)} pixels, {FRAMES} frames. Other sizes \
are possible and get worse.
- **Limits**: no textures, no scenes, no people, no text; no more than two things, which move straight.
- **License**: that of this repository. No data of others was used.
"""


def export_model(folder: Path, target: Path) -> None:
    """Write the model folder of a finished run, in the place of one that is there."""
    write_model(folder, build_parts(folder), assemble_pipeline, _CARD, target)


def begin_from_model(folder: Path, model: Path, vae_steps: int) -> None:
    """Write states from which the stages of a run in `folder` go on; nothing where the run has begun already.

    Raises `ModelFolderError` where `model` is none.
    """
    if has_begun(folder):
        return
    pipe = load_pipeline(model)
    pipe.tokenizer.save_pretrained(folder / "tokenizer")
    statistics = [pipe.vae.config.latents_mean[0], pipe.vae.config.latents_std[0]]
    torch.save(torch.tensor(statistics), folder / "latent_statistics.pt")
    write_states(folder, pipe, VideoParts.NAMES, model, vae_steps)
