"""The decision to use a patch's results again: a logistic regression of the change of what enters a block, the place of
the block and the step, trained by `scripts/train_cache_predictor.py` (PatchedServe, arXiv 2501.09253, section 7)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tridentserve.errors import ModelFolderError
from tridentserve.models.model_folder import read_json

# A model folder may have a predictor of its own under this name.
FILE_NAME = "reuse_predictor.json"
FEATURES = ("constant", "log_change", "block", "step", "log_limit")
# Changes below this one count as this one.
_LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class ReusePredictor:
    """Tells where a block would add about what it added before."""

    weights: tuple[float, ...]
    """The weight of each of `FEATURES`."""

    def allows(self, change: torch.Tensor, block: float, steps: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        """True where what a block adds has probably changed by less than the limit, relative to its size; never at a
        limit of 0. `change`: of what enters it, in float64, of any shape. `block`: its place, from 0 to 1. `steps`: the
        share of the request's steps that are done, `limits`: those of the rows, broadcastable to `change`."""
        return self.decide(compute_features(change, block, steps, limits)) & (limits > 0)

    def decide(self, features: torch.Tensor) -> torch.Tensor:
        """True where these features, (..., features), make it more probable than not."""
        return features @ torch.tensor(self.weights, dtype=torch.float64) >= 0


def compute_features(
    change: torch.Tensor, block: float | torch.Tensor, steps: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    """The features of decisions, (..., features), in float64."""
    one = torch.ones_like(change, dtype=torch.float64)
    return torch.stack(
        [
            one,
            change.double().clamp(min=_LEAST).log(),
            one * block,
            one * steps,
            one * limits.double().clamp(min=_LEAST).log(),
        ],
        dim=-1,
    )


def load_predictor(folder: Path, family: str) -> ReusePredictor:
    """The predictor in a model folder, or else the one that comes with the family. Raises `ModelFolderError` for a file
    that is damaged, or made for other features."""
    own = folder / FILE_NAME
    path = own if own.is_file() else Path(__file__).parent / f"{family}.json"
    weights: Any = read_json(path).get("weights")
    if not isinstance(weights, dict) or tuple(weights) != FEATURES or not all(map(_is_number, weights.values())):
        raise ModelFolderError(
            f"{path} has no weights of {', '.join(FEATURES)}, in this order; make it anew with "
            "scripts/train_cache_predictor.py, or remove it"
        )
    return ReusePredictor(tuple(map(float, weights.values())))


def write_predictor(path: Path, weights: Sequence[float], about: dict[str, Any]) -> None:
    """Write a predictor with what is to be known `about` it, such as the command that trained it."""
    named = dict(zip(FEATURES, weights, strict=True))
    path.write_text(json.dumps({"weights": named, **about}, indent=1) + "\n", encoding="utf-8")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
