"""The optimizers of a transformer that is trained together with its text encoders."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lib.training.muon import MatrixOptimizer

# Of the learning rate, for the layers of a T5.
_T5_SHARE = 0.3


def build_optimizers(parts: Iterable[torch.nn.Module], rate: float) -> list[torch.optim.Optimizer]:
    """One for the matrices of the layers; another for modulations, embeddings, the outer layers, biases and norms.

    T5's matrices (`layer.`) belong to the second, at a lower rate. The first lets matrices grow, and T5 divides its
    attention by nothing: it became one of a single word each, and no word's output depended on the order of words.
    """
    matrices, tables, vectors, words = [], [], [], []
    for part in parts:
        for name, parameter in part.named_parameters():
            inner = ("blocks." in name and "norm" not in name) or "layers." in name
            if parameter.ndim == 2 and inner:
                matrices.append(parameter)
            elif "layer." in name and parameter.ndim > 1:
                words.append(parameter)
            elif parameter.ndim > 1:
                tables.append(parameter)
            else:
                vectors.append(parameter)
    others = [
        {"params": tables, "weight_decay": 0.02},
        {"params": vectors, "weight_decay": 0.0},
        {"params": words, "weight_decay": 0.02, "share": _T5_SHARE},
    ]
    return [MatrixOptimizer(matrices, lr=rate), torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98))]
