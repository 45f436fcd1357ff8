"""The optimizer of the transformer: Muon for matrices, which learns in fewer steps than AdamW, and AdamW for the rest.

`torch.optim.Muon` computes in bfloat16, which takes three times as long on a CPU without such instructions; this one
does so only where the device has them (`compute_fast`), and takes matrices of one shape together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from lib.training.precision import compute_fast
from lib.training.processes import compute_shared

# Newton-Schulz iteration of Keller Jordan's Muon: five steps bring all singular values near one.
_COEFFICIENTS, _ITERATIONS = (3.4445, -4.7750, 2.0315), 5
# With 0.2 updates are as large as those of AdamW at the same learning rate (Liu et al., arXiv 2502.16982). Matrices
# bear twice as much.
_SCALE = 0.4


class MatrixOptimizer(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal before they are applied, with decay of the weights."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.02
    ):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply one step to all parameters that have gradients; each is a matrix (rows, columns)."""
        for group in self.param_groups:
            updates = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                # Nesterov's step ahead.
                update = parameter.grad.lerp(state["momentum"], group["momentum"])
                updates[parameter.shape].append((parameter, update))
            for shape, pairs in updates.items():
                scale = _SCALE * max(shape) ** 0.5 * group["lr"]
                orthogonal = compute_shared(orthogonalize, torch.stack([update for _, update in pairs]))
                for (parameter, _), update in zip(pairs, orthogonal, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices (n, rows, columns) with the same singular vectors and singular values of about one (0.5 to 1.5)."""
    first, second, third = _COEFFICIENTS
    wide: torch.Tensor = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    wide = wide / (torch.linalg.matrix_norm(wide, keepdim=True) + 1e-7)
    with compute_fast(matrices.device):
        for _ in range(_ITERATIONS):
            gram = wide @ wide.mT
            wide = first * wide + torch.baddbmm(gram, gram, gram, beta=second, alpha=third) @ wide
    wide = wide.to(matrices.dtype)
    return wide if matrices.shape[1] <= matrices.shape[2] else wide.mT
