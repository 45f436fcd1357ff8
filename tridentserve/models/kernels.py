"""The choices of how a denoising model computes. Configurations use this module, so it does not import torch."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from tridentserve.options import options

# The kernels of torch's scaled_dot_product_attention. With `sdpa`, torch chooses one that the inputs allow.
Attention = Literal["sdpa", "flash", "efficient", "cudnn", "math"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)


@options
class Kernels:
    """The kernels of the denoising model of one model folder. Both fields may change results in their last bits."""

    attention: Attention = Field(
        default="sdpa",
        description="The one kernel of the denoising model's attention; with `sdpa` torch chooses by the inputs.",
    )
    compiled: bool = Field(
        default=False,
        description="Blocks of the denoising model go through `torch.compile` at their first use, which takes up to "
        "minutes on the first worker of a node.",
    )

    def __str__(self) -> str:
        return f"attention {self.attention}, {'compiled' if self.compiled else 'not compiled'}"
