"""Trains the predictor of patches whose results are used again: records exact runs, and fits a logistic regression."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tridentserve.pipelines.adapters.sdxl import SDXLAdapter
from tridentserve.pipelines.reuse.patch_pass import (
    PatchGrid,
    compute_blocks,
    measure_change,
    use_patch_passes,
)
from tridentserve.pipelines.reuse.predictor import FEATURES, ReusePredictor, compute_features
from tridentserve.requests import GenerationInputs

# Each step is compared with so many before it: results may be that old where they are used again.
_AGES = 3
# The limits of change between which the predictor is trained, and how many of them for each comparison.
_LIMITS, _DRAWS = (0.01, 0.5), 4
_ITERATIONS, _RIDGE = 30, 1e-3

Samples = NDArray[np.float64]
"""Comparisons of a patch at two steps, (comparisons, 4): the change of what enters a stack of blocks, the place of the
stack, the share of the steps that are done, and the change of what the stack adds."""


class RunRecorder:
    """Computes all stacks, and records the changes from step to step."""

    def __init__(self, grid: PatchGrid) -> None:
        self._grid = grid
        self._past: defaultdict[int, deque[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(
            lambda: deque(maxlen=_AGES)
        )
        self.step = 0.0
        """The share of the run's steps that are done."""
        self.samples: list[Samples] = []

    def compute(
        self, number: int, place: float, blocks: Sequence[Any], tokens: torch.Tensor, text: torch.Tensor, height: int
    ) -> torch.Tensor:
        leaving, _ = compute_blocks(blocks, tokens, text)
        patches = self._grid.list_tokens(height, tokens.shape[1] // height).to(tokens.device)
        for entering, added in self._past[number]:
            changes = [
                measure_change(new, old, patches).flatten().numpy()
                for new, old in ((tokens, entering), (leaving - tokens, added))
            ]
            constants = [np.full_like(changes[0], value) for value in (place, self.step)]
            self.samples.append(np.stack([changes[0], *constants, changes[1]], axis=1))
        self._past[number].append((tokens, leaving - tokens))
        return leaving


def record_run(adapter: SDXLAdapter, inputs: GenerationInputs) -> Samples:
    """Run an exact request, and compare its steps. Stacks of blocks must have been hooked (`install_reuse`)."""
    state = adapter.prepare(adapter.encode(inputs), inputs)
    unet = adapter.pipe.unet
    grid = PatchGrid.choose(state.tensors["latents"].shape, len(unet.config.block_out_channels))
    recorder = RunRecorder(grid)
    while state.step < state.num_steps:
        recorder.step = state.step / state.num_steps
        with use_patch_passes([recorder]):
            state = adapter.step(state)
    return np.concatenate(recorder.samples)


def fit(samples: Samples, seed: int) -> ReusePredictor:
    """Fit the weights by Newton's method to whether a stack adds about the same, for limits that are drawn."""
    repeated = np.repeat(samples, _DRAWS, axis=0)
    low, high = np.log(_LIMITS)
    limits = np.exp(np.random.default_rng(seed).uniform(low, high, len(repeated)))
    inputs, labels = _compute_features(repeated, limits), repeated[:, 3] <= limits
    weights = np.zeros(len(FEATURES))
    for _ in range(_ITERATIONS):
        likely = 1 / (1 + np.exp(-np.clip(inputs @ weights, -30, 30)))
        slope = inputs.T @ (likely - labels) + _RIDGE * weights
        curvature = (inputs * (likely * (1 - likely))[:, None]).T @ inputs + _RIDGE * np.eye(len(FEATURES))
        weights -= np.linalg.solve(curvature, slope)
    return ReusePredictor(tuple(np.round(weights, 4).tolist()))


def judge(predictor: ReusePredictor, samples: Samples, limit: float) -> dict[str, float]:
    """The decisions at a limit, as shares of all comparisons: right ones, those for using results again, and of these
    the ones where the change was larger than the limit."""
    reuses = predictor.decide(torch.from_numpy(_compute_features(samples, np.full(len(samples), limit)))).numpy()
    holds = samples[:, 3] <= limit
    return {
        "limit": limit,
        "right": float((reuses == holds).mean()),
        "reused": float(reuses.mean()),
        "wrongly_reused": float((reuses & ~holds).sum() / max(reuses.sum(), 1)),
    }


def _compute_features(samples: Samples, limits: NDArray[np.float64]) -> NDArray[np.float64]:
    change, place, step, _ = map(torch.from_numpy, np.ascontiguousarray(samples.T))
    return compute_features(change, place, step, torch.from_numpy(limits)).numpy()
