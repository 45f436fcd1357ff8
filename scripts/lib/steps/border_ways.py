"""The layers of a U-Net that need the pixels around a patch: a group norm, SiLU and a convolution, as the patch path
computes them, and with the normalized pixels written straight into the tensor that has the borders.

The second way saves one copy of all pixels for each convolution, which PatchedServe fuses with the group norm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from tridentserve.pipelines.adapters.patched_unet import LatentSize, PatchLayout

_GROUPS = 32
# Requests of one, two and three patches a side, of so many rows: both passes of guidance.
_GRIDS = (1, 2, 3)
_ROWS = 2


@torch.no_grad()
def measure_borders(channels: int, side: int, rounds: int) -> dict[str, Any]:
    """One row: both ways for patches of `side` pixels, by turns. Raises `RuntimeError` where their results differ."""
    torch.manual_seed(0)
    layout = PatchLayout([LatentSize(side * n, side * n, _ROWS) for n in _GRIDS], torch.device("cpu"))
    patches = torch.randn(_ROWS * sum(n * n for n in _GRIDS), channels, side, side)
    norm, conv = torch.nn.GroupNorm(_GROUPS, channels), torch.nn.Conv2d(channels, channels, 3, padding=1)

    def compute_apart() -> torch.Tensor:
        active = functional.silu(layout.normalize(patches, norm))
        return functional.conv2d(layout.surround(active), conv.weight, conv.bias)

    def compute_fused() -> torch.Tensor:
        surrounded = patches.new_empty(len(patches), channels, side + 2, side + 2)
        torch.ops.aten.silu.out(layout.normalize(patches, norm), out=surrounded[:, :, 1:-1, 1:-1])
        layout.fill_borders(surrounded)
        return functional.conv2d(surrounded, conv.weight, conv.bias)

    surrounded = layout.surround(patches)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "apart": compute_apart,
        "fused": compute_fused,
        "convolution": lambda: functional.conv2d(surrounded, conv.weight, conv.bias),
    }
    if not torch.allclose(compute_apart(), compute_fused(), atol=1e-5):
        raise RuntimeError(f"the ways differ with {channels} channels")
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, compute in ways.items():
            began_s = time.perf_counter()
            compute()
            times_s[name].append(time.perf_counter() - began_s)
    apart_s = statistics.median(times_s["apart"])
    ratios = [fused / apart for fused, apart in zip(times_s["fused"], times_s["apart"], strict=True)]
    return {
        "channels": channels,
        "patch_side": side,
        "fused_ratio": round(statistics.median(ratios), 3),
        "convolution_share": round(statistics.median(times_s["convolution"]) / apart_s, 3),
    }
