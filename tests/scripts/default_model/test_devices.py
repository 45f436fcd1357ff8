"""The device that trains: all of the training is computed there, and states go on on any other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts.default_model.whole_run import SCRIPTS, run_script
from tests.support.processes import output_of


def train_on_stand_in(*options: str) -> dict[str, int]:
    """A training in a process with the stand-in of a GPU. Returns where products and convolutions were computed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent), str(SCRIPTS)])}
    command = [sys.executable, "-m", "tests.scripts.default_model.stand_in_gpu", *options]
    computed: dict[str, int] = json.loads(output_of(command, SCRIPTS.parent, environment).splitlines()[-1])
    return computed


def list_tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [tensor for each in inner for tensor in list_tensors(each)]


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ((), {"vae", "denoiser"}),
        pytest.param(("--video",), {"vae", "reading", "denoiser"}, marks=pytest.mark.slow),
    ],
)
def test_all_is_computed_on_the_gpu_and_states_go_on_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], trained: set[str]
) -> None:
    """The VAE's training begins on the CPU and goes on on the stand-in; the transformer's the other way round."""
    quick = (*options, "--quick", "--threads", "1", "--out", str(tmp_path))
    run_script("train_default_model", monkeypatch, *quick, "--device", "cpu", "--stages", "vae")
    # `auto` finds the stand-in, which one process has.
    stages = ("--processes", "2", "--vae-steps", "3", "--stages", "vae", "latents", "denoiser")
    computed = train_on_stand_in(*quick, *stages)
    assert set(computed) == {"stand_in"}
    assert computed["stand_in"] > 1000
    states = {name: torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in trained}
    assert {name: state["step"] for name, state in states.items()} == dict.fromkeys(trained, 2) | {"vae": 3}
    for state in states.values():
        tensors = list_tensors(state)
        assert len(tensors) > 100
        assert {tensor.device for tensor in tensors} == {torch.device("cpu")}
    assert (tmp_path / "denoiser-000002.png").exists()
    run_script("train_default_model", monkeypatch, *quick, "--device", "cpu", "--steps", "3", "--stages", "denoiser")
    assert torch.load(tmp_path / "denoiser.pt", weights_only=True)["step"] == 3
