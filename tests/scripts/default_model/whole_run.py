"""A whole training on the smallest scale, and the judge's figures of its model, in this process."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


def train_and_judge(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *options: str,
    trained_with: Sequence[str] = (),
) -> tuple[Path, dict[str, Any]]:
    """The model folder of a quick training in `folder`, and what the judge prints about it at its end.
    `trained_with`: options that the judge does not have."""
    run_script("train_default_model", monkeypatch, *options, *trained_with, "--quick", "--out", str(folder))
    model = Path(capsys.readouterr().out.splitlines()[-1])
    run_script("judge", monkeypatch, str(model), *options, "--quick")
    return model, json.loads(capsys.readouterr().out.splitlines()[-1])


def run_script(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run a script of this repository in this process."""
    path = SCRIPTS / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    runpy.run_path(str(path))["main"]()
