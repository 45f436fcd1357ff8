"""The trained default model as a model folder, in half precision, with its card."""

from __future__ import annotations

import datetime
import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

import diffusers
import torch

from lib.default_model import words
from lib.default_model.denoiser_training import load_averages
from lib.default_model.pipeline import assemble_pipeline
from lib.default_model.restart import HISTORY, count_earlier_steps

_CARD = """\
# The default model of TridentServe

A small text-to-image model with the parts of Stable Diffusion 3, for prompts such as "a red circle above a blue \
square" and a service without any download. It was trained by `scripts/train_default_model.py` of this repository, on \
pictures that the script draws itself, and knows nothing else. `docs/default-model.md` says how good it is.

- **Made on** {date}, with torch {torch} and diffusers {diffusers}; {steps:,} steps of the transformer, {vae_steps:,} \
of the VAE. All files have {size_mb:.1f} MB (half precision; the service computes in the precision that it is told).
- **Data**: pictures of one to four shapes, {pictures:,} of them, on a plain background, each with four wordings of \
what it shows. One in sixteen of the combinations of shapes, colors, numbers and relations was never trained on; the \
judge (`scripts/judge.py`) asks for these.
- **Words**: {shapes}; {colors}; small, medium, large; above, below, left of, right of; corners and sides; two, three, \
four; backgrounds {backgrounds}. Other words are spelled by the tokenizers and mean nothing to the model.
- **Sizes**: 64 to 256 pixels a side, multiples of 16, ratios up to 2. Larger pictures are possible and get worse.
- **Limits**: no textures, no scenes, no people, no text; no three shapes of different kinds, no relations of more \
than two.
- **License**: that of this repository. No data of others was used.
"""


def export_model(folder: Path, target: Path) -> Path:
    """Write the model folder of a finished run, in the place of one that is there. Returns it."""
    parts, steps = load_averages(folder)
    pipe = assemble_pipeline(folder, parts).to(torch.float16)
    if target.exists():
        shutil.rmtree(target)
    pipe.save_pretrained(target, safe_serialization=True)
    history = _describe_training(folder, steps)
    (target / HISTORY).write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
    card = _CARD.format(**history, **_describe_model(target))
    lines = [textwrap.fill(line, 118, subsequent_indent="  " * line.startswith("-")) for line in card.splitlines()]
    (target / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


def _describe_training(folder: Path, steps: int) -> dict[str, Any]:
    earlier = count_earlier_steps(folder)
    vae_log = folder / "vae.jsonl"
    if vae_log.exists():
        earlier["vae_steps"] += json.loads(vae_log.read_text(encoding="utf-8").splitlines()[-1])["step"]
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "steps": earlier["steps"] + steps,
        "vae_steps": earlier["vae_steps"],
        "pictures": count_pictures(folder),
    }


def _describe_model(target: Path) -> dict[str, Any]:
    sizes = [path.stat().st_size for path in target.rglob("*") if path.is_file()]
    return {
        "size_mb": sum(sizes) / 1e6,
        "shapes": ", ".join(words.SHAPES),
        "colors": ", ".join(words.COLORS),
        "backgrounds": ", ".join(words.BACKGROUNDS),
    }


def count_pictures(folder: Path) -> int:
    """Count the pictures that were prepared for training."""
    from safetensors import safe_open

    total = 0
    for path in (folder / "latents").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += file.get_slice("latents").get_shape()[0]
    return total
