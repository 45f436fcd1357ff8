"""The optimizers of a transformer that is trained together with its text encoders."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lib.training.muon import MatrixOptimizer


def build_optimizers(parts: Iterable[torch.nn.Module], rate: float) -> list[torch.optim.Optimizer]:
    """One for the matrices of the layers; another for modulations, embeddings, the outer layers, biases and norms."""
    matrices, tables, vectors = [], [], []
    for part in parts:
        for name, parameter in part.named_parameters():
            inner = ("blocks." in name and "norm" not in name) or "layers." in name or "layer." in name
            if parameter.ndim == 2 and inner and "relative_attention_bias" not in name:
                matrices.append(parameter)
            elif parameter.ndim > 1:
                tables.append(parameter)
            else:
                vectors.append(parameter)
    others = [{"params": tables, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]
    return [MatrixOptimizer(matrices, lr=rate), torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98))]
