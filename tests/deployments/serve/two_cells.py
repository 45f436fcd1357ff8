"""The configuration of a service of two cells."""

from __future__ import annotations

from typing import Any

from deployments.config.app import AppArgs

TWO_CELLS: dict[str, Any] = {
    "models": [{"name": "tiny-sd3", "tiny": "sd3"}],
    "scheduler": {"cells": 2},
    "cluster": {"nodes": 2, "workers_per_node": 2, "memory_mb": 512},
    "placement": ["EDC"] * 4,
}


def make_two_cells(**changes: Any) -> AppArgs:
    """Two cells of two workers each."""
    return AppArgs.model_validate({**TWO_CELLS, **changes})
