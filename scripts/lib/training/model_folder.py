"""Model folders that a run writes, and those that a run begins from."""

from __future__ import annotations

import datetime
import json
import shutil
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import diffusers
import torch

from lib.training.parts import TrainedParts
from lib.training.runs import load_averages
from tridentserve.pipelines.loading import convert_tensors

# In the model folder: how it was trained. In a run's folder: how the model was trained that the run began from.
HISTORY = "training.json"

AnyParts = TypeVar("AnyParts", bound=TrainedParts)


def write_model(
    folder: Path, parts: AnyParts, assemble: Callable[[Path, AnyParts], Any], card: str, target: Path
) -> None:
    """Write the pipeline that `assemble` makes of a finished run, in half precision, to `target`, in the place of one
    that is there. `parts` are new ones, which get the averages of the run.

    `card` is the text of its card; the keys of its history and `size_mb` may stand in it in braces.
    """
    steps = load_averages(folder, "denoiser", parts.trained())
    pipe = assemble(folder, parts)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            kept = (part._keep_in_fp32_modules or []) if isinstance(part, diffusers.ModelMixin) else []
            convert_tensors(part, torch.float16, kept)
    if target.exists():
        shutil.rmtree(target)
    pipe.save_pretrained(target)
    history = _describe_training(folder, steps)
    (target / HISTORY).write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
    size_mb = sum(path.stat().st_size for path in target.rglob("*") if path.is_file()) / 1e6
    text = card.format(**history, size_mb=size_mb)
    lines = [textwrap.fill(line, 118, subsequent_indent="  " * line.startswith("-")) for line in text.splitlines()]
    (target / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


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
        "samples": _count_samples(folder),
    }


def _count_samples(folder: Path) -> int:
    """Count the pictures or clips that were prepared for training."""
    from safetensors import safe_open

    total = 0
    for path in (folder / "latents").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += file.get_slice("latents").get_shape()[0]
    return total


def count_earlier_steps(folder: Path) -> dict[str, int]:
    """The steps of all earlier runs: keys `steps` (of the transformer) and `vae_steps`."""
    if not (folder / HISTORY).exists():
        return {"steps": 0, "vae_steps": 0}
    history = json.loads((folder / HISTORY).read_text(encoding="utf-8"))
    return {key: int(history[key]) for key in ("steps", "vae_steps")}


def has_begun(folder: Path) -> bool:
    """Tell whether a run has states in `folder`."""
    return (folder / "vae.pt").exists()


def write_states(folder: Path, pipe: Any, trained: Iterable[str], model: Path, vae_steps: int) -> None:
    """Write states from which the stages of a run in `folder` go on with the weights of `model`, loaded as `pipe`.

    The VAE counts as trained for `vae_steps`. The parts named in `trained` begin anew at step 0.
    """
    weights = {name: getattr(pipe, name).state_dict() for name in trained}
    torch.save({"step": 0, "parts": weights, "averages": weights}, folder / "denoiser.pt")
    (folder / HISTORY).write_text((model / HISTORY).read_text(encoding="utf-8"), encoding="utf-8")
    weights = {"vae": pipe.vae.state_dict()}
    torch.save({"step": vae_steps, "parts": weights, "averages": weights}, folder / "vae.pt")
