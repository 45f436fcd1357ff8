"""The precision and the kernels with which a CPU trains small models fastest."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def multiplies_bfloat16() -> bool:
    """Tell whether this CPU has instructions for products of bfloat16 numbers."""
    return bool(torch.cpu.get_capabilities().get("avx512_bf16"))


@contextmanager
def compute_fast() -> Iterator[None]:
    """Within this, products of matrices are computed in bfloat16 where the CPU has instructions for it (four times as
    fast), and attention by plain products: torch's own kernel for CPUs is slow backwards for few tokens. Weights keep
    their precision."""
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=multiplies_bfloat16()),
        sdpa_kernel(SDPBackend.MATH),
        warnings.catch_warnings(),
    ):
        # A norm of bfloat16 numbers with weights in single precision is computed, in several operations.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)
        yield
