"""Processes that train together. What they import is little, as each imports it."""

from __future__ import annotations

from pathlib import Path

import torch
from lib.training.processes import count_processes, get_rank, run_processes
from lib.training.runs import TrainingRun

STEPS = 4


def train_together(folder: Path, pictures: int) -> None:
    """Train a layer on the share of this process of the same data, and write its weights."""
    torch.manual_seed(4)
    layer = torch.nn.Linear(4, 4)
    data = torch.randn(STEPS, pictures, 4)
    run = TrainingRun(folder, "layer", {"layer": layer}, [torch.optim.SGD(layer.parameters())])
    for step in run.iterate(STEPS):
        share = data[step].chunk(count_processes())[get_rank()]
        run.learn(layer(share).square().mean(), 0.1)


def test_processes_that_train_together_learn_what_one_learns(tmp_path: Path) -> None:
    for processes in (1, 2):
        run_processes(processes, train_together, tmp_path / str(processes), 8)
    alone, together = (
        torch.load(tmp_path / str(processes) / "layer.pt", weights_only=True)["parts"]["layer"] for processes in (1, 2)
    )
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value)
