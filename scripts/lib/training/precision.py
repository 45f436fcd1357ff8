"""The precision and the kernels with which a device trains small models fastest."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tridentserve.device import find_device


@contextmanager
def compute_fast(device: torch.device) -> Iterator[None]:
    """Within this, products of matrices on the device are computed in bfloat16 where it has instructions for it (on a
    CPU four times as fast), and attention on a CPU by plain products: torch's own kernel for CPUs is slow backwards for
    few tokens. Weights keep their precision."""
    place = find_device(device)
    with (
        torch.autocast(place.kind, torch.bfloat16, enabled=place.multiplies_bfloat16),
        sdpa_kernel(SDPBackend.MATH) if place.is_host else nullcontext(),
        warnings.catch_warnings(),
    ):
        # A norm of bfloat16 numbers with weights in single precision is computed, in several operations.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight", UserWarning)
        yield
