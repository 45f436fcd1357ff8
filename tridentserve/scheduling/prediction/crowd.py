"""The crowd that a request comes into: how much work is under way and waits, for which workers."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

from tridentserve.requests import RequestSpec
from tridentserve.scheduling.ledger import Ledger
from tridentserve.scheduling.prediction.experience import Crowding
from tridentserve.scheduling.prediction.scene_builder import SceneBuilder

# Of more requests than this each n-th is looked at.
_MOST_REQUESTS = 600


class RequestCrowd:
    """The requests that have not ended at `now_s`, summed up by model."""

    def __init__(self, ledger: Ledger, builder: SceneBuilder, now_s: float) -> None:
        self._builder = builder
        self._work_s: defaultdict[str, float] = defaultdict(float)
        self._demand: defaultdict[str, float] = defaultdict(float)
        # The worker-seconds of those that wait, with their deadlines, by model.
        self._waiting: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        stride = 1 + len(ledger.requests) // _MOST_REQUESTS
        for request in islice(ledger.requests.values(), 0, None, stride):
            spec, steps = request.spec, float(request.steps_left)
            if (costs := builder.find_costs(spec)) is None:
                continue
            if (run := request.run) is not None and run.step_s > 0:
                steps -= run.num_steps - min(run.num_steps, max(0.0, (run.diffuse_end_s - now_s) / run.step_s))
            work_s = stride * costs.least_gpu_seconds(max(0.0, steps), False)
            self._work_s[spec.model] += work_s
            self._demand[spec.model] += stride * costs.optimal
            if run is None:
                self._waiting[spec.model].append((request.deadline_s, work_s))

    def measure(self, spec: RequestSpec, alone_s: float) -> Crowding:
        """The crowd around the workers that hold D of the request's model; `alone_s`: what the request takes alone."""
        work_s = demand = 0.0
        shares = self._builder.list_shares(spec.model)
        for model, share in shares.items():
            work_s += share * self._work_s.get(model, 0.0)
            demand += share * self._demand.get(model, 0.0)
        num_workers = max(1, self._builder.count_workers(spec.model))
        return Crowding(work_s / num_workers / max(alone_s, 1e-6), demand / num_workers)

    def estimate_wait_s(self, spec: RequestSpec, deadline_s: float) -> float:
        """Seconds until all that waits and is due before the deadline has had its part of the workers."""
        waiting_s = sum(
            share * sum(work_s for due_s, work_s in self._waiting.get(model, ()) if due_s <= deadline_s)
            for model, share in self._builder.list_shares(spec.model).items()
        )
        return waiting_s / max(1, self._builder.count_workers(spec.model))
