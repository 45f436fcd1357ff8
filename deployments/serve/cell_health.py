"""The health of a service with several cells, from that of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ABSENT = "unavailable"
# The states in which a model takes requests, the best one first.
_OPEN = ("serving", "warming")


def combine_health(cells: Sequence[Mapping[str, Any]], num_workers: int) -> dict[str, Any]:
    """The answer to `GET /health` from those of the cells, in their order; that of a cell which does not answer is
    empty. The service is ready when all cells are, and degraded when some take requests. A model is in the state that
    serves best of all its states."""
    states = [str(cell.get("status", _ABSENT)) for cell in cells]
    ready = states.count("ready")
    if ready == len(states):
        status = "ready"
    elif ready or "degraded" in states:
        status = "degraded"
    else:
        status = next((state for state in states if state != _ABSENT), _ABSENT)
    models: dict[str, str] = {}
    for cell in cells:
        for name, state in cell.get("models", {}).items():
            models[name] = next((best for best in _OPEN if best in (state, models.get(name))), state)
    aside = {worker: why for cell in cells for worker, why in cell.get("aside", {}).items()}
    return {
        "status": status,
        "workers": sum(cell.get("workers", 0) for cell in cells),
        "workers_total": num_workers,
        "placement": {worker: label for cell in cells for worker, label in cell.get("placement", {}).items()},
        "models": models,
        "problems": list(dict.fromkeys(problem for cell in cells for problem in cell.get("problems", ()))),
        "cells": [
            {"status": state, "workers": cell.get("workers", 0)} for state, cell in zip(states, cells, strict=True)
        ],
        **({"aside": aside} if aside else {}),
    }
