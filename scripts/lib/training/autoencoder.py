"""Training of a VAE, of pictures or of clips."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from lib.training.processes import count_processes, get_rank
from lib.training.runs import TrainingRun, load_averages, plan_rate
from lib.training.seeds import derive_seed

_PEAK_RATE = 3e-3
_KL_WEIGHT = 3e-4


def train_autoencoder(
    folder: Path,
    build: Callable[[], Any],
    draw: Callable[[random.Random], torch.Tensor],
    seed: int,
    steps: int,
    batch: int,
    device: torch.device,
) -> None:
    """Train the VAE that `build` builds up to `steps` in all on what `draw` draws, each from -1 to 1, without the batch
    dimension.

    A step has `batch` of them, which processes that train together share. What is learned lies in `folder/vae.pt`,
    figures in `folder/vae.jsonl`.
    """
    torch.manual_seed(derive_seed(seed, "vae"))
    vae = build().to(device)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=_PEAK_RATE, weight_decay=1e-4, betas=(0.9, 0.99))
    run = TrainingRun(folder, "vae", {"vae": vae}, [optimizer])
    for step in run.iterate(steps):
        rng = random.Random(derive_seed(seed, "crops", step, get_rank()))
        torch.manual_seed(derive_seed(seed, "noise", step, get_rank()))
        pixels = torch.stack([draw(rng) for _ in range(-(-batch // count_processes()))])
        layout = torch.channels_last if pixels.ndim == 4 else torch.channels_last_3d
        pixels = pixels.to(device, memory_format=layout)
        posterior = vae.encode(pixels).latent_dist
        # The generator is that of the CPU, so that all devices have the same numbers.
        decoded = vae.decode(posterior.sample(torch.default_generator)).sample
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        l1, l2 = functional.l1_loss(decoded, pixels), functional.mse_loss(decoded, pixels)
        run.learn(l1 + l2 + _KL_WEIGHT * kl, plan_rate(step, steps, _PEAK_RATE))
        run.average(0.998)
        if step % 20 == 0:
            run.log(l1=l1.item(), l2=l2.item(), kl=kl.item())


def load_autoencoder(folder: Path, vae: Any) -> Any:
    """The averaged VAE of a run, ready to encode and decode; `vae` is a new one of its architecture."""
    load_averages(folder, "vae", {"vae": vae})
    return vae


def spread_channels_last(vae: torch.nn.Module) -> Any:
    """Lay out the weights of convolutions as a CPU computes them fastest. Returns the VAE."""
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv3d):
            module.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        elif isinstance(module, torch.nn.Conv2d):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return vae
