"""Processes that train together. What they import is little, as each imports it."""

from __future__ import annotations

from pathlib import Path

import torch
from lib.training.muon import MatrixOptimizer
from lib.training.processes import count_processes, get_rank, run_processes
from lib.training.runs import TrainingRun

from tridentserve.device import find_device

STEPS = 4


def train_together(folder: Path, pictures: int) -> None:
    """Train layers on the share of this process of the same data, and write their weights."""
    torch.manual_seed(4)
    layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    data = torch.randn(STEPS, pictures, 4)
    matrices, vectors = ([value for value in layers.parameters() if value.ndim == rank] for rank in (2, 1))
    run = TrainingRun(folder, "layers", {"layers": layers}, [MatrixOptimizer(matrices, 0.1), torch.optim.SGD(vectors)])
    for step in run.iterate(STEPS):
        share = data[step].chunk(count_processes())[get_rank()]
        run.learn(layers(share).square().mean(), 0.1)


def test_processes_that_train_together_learn_what_one_learns(tmp_path: Path) -> None:
    for processes in (1, 2):
        run_processes(processes, train_together, tmp_path / str(processes), 8)
    alone, together = (
        torch.load(tmp_path / str(processes) / "layers.pt", weights_only=True)["parts"]["layers"]
        for processes in (1, 2)
    )
    # Updates of matrices are products of such numbers there.
    relative, absolute = (0.02, 0.005) if find_device("cpu").multiplies_bfloat16 else (1e-3, 1e-5)
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=relative, atol=absolute)
