"""The trained default model as a model folder, with its card; and a run that begins from one, whose states are gone."""

from __future__ import annotations

from pathlib import Path

import diffusers
import torch

from lib.default_model import words
from lib.default_model.pipeline import ModelParts, assemble_pipeline, build_parts
from lib.training.model_folder import has_begun, write_model, write_states

_CARD = f"""\
# The default model of TridentServe

A small text-to-image model with the parts of Stable Diffusion 3, for prompts such as "a red circle above a blue \
square" and a service without any download. It was trained by `scripts/train_default_model.py` of this repository, on \
pictures that the script draws itself, and knows nothing else. `docs/default-model.md` says how good it is.

- **Made on** {{date}}, with torch {{torch}} and diffusers {{diffusers}}; {{steps:,}} steps of the transformer, \
{{vae_steps:,}} of the VAE. All files have {{size_mb:.1f}} MB (half precision; the service computes in the precision \
that it is told).
- **Data**: pictures of one to four shapes, {{samples:,}} of them, on a plain background, each with four wordings of \
what it shows. One in sixteen of the combinations of shapes, colors, numbers and relations was never trained on; the \
judge (`scripts/judge.py`) asks for these.
- **Words**: {", ".join(words.SHAPES)}; {", ".join(words.COLORS)}; small, medium, large; above, below, left of, right \
of; corners and sides; two, three, four; backgrounds {", ".join(words.BACKGROUNDS)}. Other words are spelled by the \
tokenizers and mean nothing to the model.
- **Sizes**: 64 to 256 pixels a side, multiples of 16, ratios up to 2. Larger pictures are possible and get worse.
- **Limits**: no textures, no scenes, no people, no text; no three shapes of different kinds, no relations of more \
than two.
- **License**: that of this repository. No data of others was used.
"""


def export_model(folder: Path, target: Path) -> None:
    """Write the model folder of a finished run, in the place of one that is there."""
    write_model(folder, build_parts(folder), assemble_pipeline, _CARD, target)


def begin_from_model(folder: Path, model: Path, vae_steps: int) -> None:
    """Write states from which the stages of a run in `folder` go on; nothing where the run has begun already.

    Raises `OSError` where `model` is no model folder.
    """
    if has_begun(folder):
        return
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(model, dtype=torch.float32)
    pipe.tokenizer.save_pretrained(folder / "tokenizer")
    pipe.tokenizer_3.save_pretrained(folder / "tokenizer_3")
    torch.save(torch.tensor(1 / pipe.vae.config.scaling_factor), folder / "latent_deviation.pt")
    write_states(folder, pipe, ModelParts.NAMES, model, vae_steps)
