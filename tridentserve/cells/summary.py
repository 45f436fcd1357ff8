"""The summary of a cell's load, from which others predict when it would finish a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CellModelLoad:
    """The load of those workers of a cell that hold D of one model."""

    num_workers: int
    num_idle: int
    """Number of those that have nothing to do."""
    work_s: float
    """Seconds of work for each of them, in the mean: what they have been given, and their part of what waits."""


@dataclass(frozen=True, slots=True)
class CellSummary:
    """The load of a cell at one moment."""

    models: Mapping[str, CellModelLoad]
    """The load by model; a model without workers has no entry."""
