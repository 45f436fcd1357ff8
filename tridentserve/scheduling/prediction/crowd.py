"""The crowd that a request comes into: how much work is under way and waits, for which workers."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

from tridentserve.protocols import PendingRequest
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.prediction.costs import RequestCosts
from tridentserve.scheduling.prediction.degrees import expect_first_way, list_ways
from tridentserve.scheduling.prediction.experience import LEAST_ESTIMATE_S, Crowding, Estimate
from tridentserve.scheduling.prediction.scene_builder import SceneBuilder
from tridentserve.scheduling.runs.ledger import Ledger
from tridentserve.scheduling.runs.request import Request

# Of more requests than this each n-th is looked at.
_MOST_REQUESTS = 600


class RequestCrowd:
    """The requests that have not ended at `now_s`, summed up by model, and the estimates that can be made of it."""

    def __init__(self, ledger: Ledger, builder: SceneBuilder, now_s: float, spare: float, asked: float) -> None:
        """`spare`: see `SharingRules`; `asked`: the efficiency that the policy asks for."""
        self._builder = builder
        self._now_s = now_s
        self._spare = spare
        self._asked = asked
        self._work_s: defaultdict[str, float] = defaultdict(float)
        self._demand: defaultdict[str, float] = defaultdict(float)
        # The worker-seconds of those that wait, with their deadlines, by model.
        self._waiting: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        stride = 1 + len(ledger.requests) // _MOST_REQUESTS
        for request in islice(ledger.requests.values(), 0, None, stride):
            spec = request.spec
            if (costs := builder.find_costs(spec)) is None:
                continue
            work_s = stride * costs.least_gpu_seconds(_count_steps_left(request, now_s), False)
            self._work_s[spec.model] += work_s
            self._demand[spec.model] += stride * costs.optimal
            if request.run is None:
                self._waiting[spec.model].append((request.deadline_s, work_s))

    def estimate(self, request: Request, costs: RequestCosts) -> Estimate:
        """The estimate for a request that has not ended."""
        if (run := request.run) is None:
            return self.estimate_waiting(request.make_view(), costs)
        degree = max((k for k in costs.step_s if k <= len(run.assignment.diffuse)), default=min(costs.step_s))
        left_s = costs.take_s(degree, _count_steps_left(request, self._now_s), not request.encoded)
        return self._make_estimate(request.spec, costs, left_s, degree)

    def estimate_waiting(self, request: PendingRequest, costs: RequestCosts) -> Estimate:
        """The estimate for a request that waits, as if it went on at the degree at which it can begin now."""
        spec, deadline_s = request.spec, request.deadline_s
        ways = list_ways(costs, spec.num_inference_steps - request.steps_done, not request.encoded)
        idle = self._builder.find_widest_idle(spec.model)
        way = expect_first_way(ways, costs.optimal, deadline_s - self._now_s, self._spare, self._asked, idle)
        return self._make_estimate(spec, costs, self._estimate_wait_s(spec, deadline_s) + way.seconds, way.degree)

    def _make_estimate(self, spec: RequestSpec, costs: RequestCosts, seconds: float, degree: int) -> Estimate:
        crowding = self._measure(spec, costs.alone_s(spec.num_inference_steps, True))
        return Estimate(max(LEAST_ESTIMATE_S, seconds), degree, crowding.as_signs())

    def _measure(self, spec: RequestSpec, alone_s: float) -> Crowding:
        """The crowd around the workers that hold D of the request's model; `alone_s`: what the request takes alone."""
        work_s = demand = 0.0
        shares = self._builder.list_shares(spec.model)
        for model, share in shares.items():
            work_s += share * self._work_s.get(model, 0.0)
            demand += share * self._demand.get(model, 0.0)
        num_workers = max(1, self._builder.count_workers(spec.model))
        return Crowding(work_s / num_workers / max(alone_s, 1e-6), demand / num_workers)

    def _estimate_wait_s(self, spec: RequestSpec, deadline_s: float) -> float:
        """Seconds until all that waits and is due before the deadline has had its part of the workers."""
        waiting_s = sum(
            share * sum(work_s for due_s, work_s in self._waiting.get(model, ()) if due_s <= deadline_s)
            for model, share in self._builder.list_shares(spec.model).items()
        )
        return waiting_s / max(1, self._builder.count_workers(spec.model))


def _count_steps_left(request: Request, now_s: float) -> float:
    if (run := request.run) is None or run.step_s <= 0:
        return request.steps_left
    to_come = min(run.num_steps, max(0.0, (run.diffuse_end_s - now_s) / run.step_s))
    return max(0.0, request.steps_left - run.num_steps + to_come)
