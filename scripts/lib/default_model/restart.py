"""The beginning of a run from a model folder that an earlier run exported, whose states are gone."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import torch

from lib.default_model.pipeline import ModelParts

# In the model folder: how it was trained. In a run's folder: how the model was trained that the run began from.
HISTORY = "training.json"


def begin_from_model(folder: Path, model: Path, vae_steps: int) -> None:
    """Write states from which the stages of a run in `folder` go on; nothing where the run has begun already.

    The VAE counts as trained for `vae_steps`. The transformer and its encoders begin anew at step 0 with the model's
    weights. Raises `OSError` where `model` is no model folder.
    """
    if (folder / "vae.pt").exists():
        return
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(model, dtype=torch.float32)
    pipe.tokenizer.save_pretrained(folder / "tokenizer")
    pipe.tokenizer_3.save_pretrained(folder / "tokenizer_3")
    parts = ModelParts(
        **{name: getattr(pipe, name) for name in ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3")},
        tokenizer=pipe.tokenizer,
        tokenizer_3=pipe.tokenizer_3,
    )
    weights = {name: part.state_dict() for name, part in parts.trained().items()}
    torch.save({"step": 0, "parts": weights, "averages": weights}, folder / "denoiser.pt")
    torch.save(torch.tensor(1 / pipe.vae.config.scaling_factor), folder / "latent_deviation.pt")
    (folder / HISTORY).write_text((model / HISTORY).read_text(encoding="utf-8"), encoding="utf-8")
    weights = {"vae": pipe.vae.state_dict()}
    torch.save({"step": vae_steps, "parts": weights, "averages": weights}, folder / "vae.pt")


def count_earlier_steps(folder: Path) -> dict[str, int]:
    """The steps of all earlier runs: keys `steps` (of the transformer) and `vae_steps`."""
    if not (folder / HISTORY).exists():
        return {"steps": 0, "vae_steps": 0}
    history = json.loads((folder / HISTORY).read_text(encoding="utf-8"))
    return {key: int(history[key]) for key in ("steps", "vae_steps")}
