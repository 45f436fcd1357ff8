"""How denoising models compute, where that can be chosen. No torch here: configurations use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

# Kernels of torch's scaled_dot_product_attention. `sdpa`: torch chooses, by what the inputs allow.
Attention = Literal["sdpa", "flash", "efficient", "cudnn", "math"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)


@dataclass(frozen=True, slots=True)
class Kernels:
    """`attention`: that kernel and no other. `compiled`: blocks go through `torch.compile` when they first run, which
    takes from seconds to minutes. Both may change results in their last bits."""

    attention: Attention = "sdpa"
    compiled: bool = False

    def __str__(self) -> str:
        return f"attention {self.attention}, {'compiled' if self.compiled else 'not compiled'}"
