"""The weight of each model's requests: the options' own, and more while the model has had less than its fair share."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from dispatch.candidates.work import Waiting
from dispatch.options import DispatchOptions
from tridentserve.protocols import Assignment

# The GPU-seconds that were given out count less by a factor of e after each such time.
_MEMORY_S = 300.0
# Values differ by orders of magnitude, so a small lack must change a weight much: by this power of the ratio of what a
# model should have had to what it had.
_POWER = 16
# A lack changes a weight by no more than this factor, so that solvers keep to their tolerances.
_MOST = 1e4


class ModelWeights:
    """Remembers the GPU-seconds that models with shares were given while they competed: the GPUs that run D, times the
    seconds until the plan ends."""

    def __init__(self, options: DispatchOptions) -> None:
        self._own = options.request_weights or {}
        self._shares = options.fair_shares or {}
        self._given: dict[str, float] = defaultdict(float)
        self._noted_s = 0.0

    def weigh(self, waiting: Waiting) -> Mapping[str, float]:
        """The weight of each model that is asked for."""
        lacks = self._compute_lacks(waiting)
        return {
            model: self._own.get(model, 1.0) * min(max(lacks.get(model, 1.0) ** _POWER, 1 / _MOST), _MOST)
            for model in {work.model: None for work in waiting}
        }

    def find_ahead(self, waiting: Waiting) -> frozenset[str]:
        """The models that had more than their share: none of their requests goes before all others."""
        return frozenset(model for model, lack in self._compute_lacks(waiting).items() if lack < 1)

    def note(self, waiting: Waiting, assignments: Iterable[Assignment], now_s: float) -> None:
        """Count what a tick gives out. What a model has while it does not compete is not held against it."""
        sharing = self._list_sharing(waiting)
        if len(sharing) < 2:
            return
        kept = math.exp(-max(0.0, now_s - self._noted_s) / _MEMORY_S)
        self._noted_s = now_s
        for model in self._given:
            self._given[model] *= kept
        models = {request.spec.request_id: work.model for work, alike in waiting.items() for request in alike}
        for each in assignments:
            if (model := models[each.request_ids[0]]) in sharing:
                self._given[model] += len(each.diffuse) * (each.expected_finish_s - now_s)

    def _compute_lacks(self, waiting: Waiting) -> Mapping[str, float]:
        """The GPU-seconds that each model with a share should have had, over those that it had. Shares are relative to
        those of the others that wait: nobody waits for a model that asks for nothing."""
        sharing = self._list_sharing(waiting)
        wanted, given = sum(self._shares[model] for model in sharing), sum(self._given[model] for model in sharing)
        least = given / _MOST
        return {
            model: self._shares[model] / wanted * given / max(self._given[model], least) for model in sharing if given
        }

    def _list_sharing(self, waiting: Waiting) -> Sequence[str]:
        return sorted({work.model for work in waiting if work.model in self._shares})
