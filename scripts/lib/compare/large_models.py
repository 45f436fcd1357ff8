"""A model whose denoising transformer is larger than the memory of a worker: its folder, and its profile table."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch

from profiler.tables.rows import ProfileTable, read_shipped_table, write_table
from tridentserve.models.model_folder import stage_weights_bytes
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.stages import Stage

_TABLE, _TINY = "tiny-cpu", "tiny-flux"
_MAX_DEGREE = 2


@dataclass(frozen=True, slots=True)
class LargeModel:
    """A FLUX of random weights and many layers."""

    name: str
    folder: Path
    table: Path
    """The times of the tiny FLUX, with the weights of this one."""
    diffuse_bytes: int
    """The weights of D."""

    @classmethod
    def make(cls, name: str, folder: Path, layers: int, heads: int, cache: Path) -> LargeModel:
        """Write its files below `folder`: with 32 heads one layer of 38 MB, and `layers` of 16 MB. `cache` has the
        tiny models."""
        target = folder / name
        shutil.copytree(ensure_tiny("flux", cache), target)
        config: dict[str, Any] = json.loads((target / "transformer" / "config.json").read_text())
        config = {key: value for key, value in config.items() if not key.startswith("_")}
        config |= {"num_layers": 1, "num_single_layers": layers, "num_attention_heads": heads}
        shutil.rmtree(target / "transformer")
        torch.manual_seed(0)
        diffusers.FluxTransformer2DModel(**config).save_pretrained(target / "transformer")
        held = stage_weights_bytes(target)
        known = read_shipped_table(_TABLE)
        table = ProfileTable(
            name,
            tuple(replace(row, model=name) for row in known.rows if row.model == _TINY and row.degree <= _MAX_DEGREE),
            tuple(
                replace(row, model=name, weights_bytes=held[row.stage]) for row in known.weights if row.model == _TINY
            ),
        )
        path = folder / f"{name}.csv"
        write_table(path, table)
        return cls(name, target, path, held[Stage.DIFFUSE])
