"""Expected seconds of what the scheduler sends out, and what it learns from what has run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tridentserve.plans import DispatchPlan, Replica, StageSpan
from tridentserve.protocols import Replanner, StageReport, StageTimes
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.estimation.plan_estimates import batch_seconds, stage_degree
from tridentserve.scheduling.estimation.request_work import estimate_work
from tridentserve.scheduling.estimation.step_shares import StepShares
from tridentserve.scheduling.runs.legs import Leg
from tridentserve.scheduling.runs.run import Run
from tridentserve.scheduling.workers.worker_pool import WorkerPool
from tridentserve.stages import Stage

# TridentServe, arXiv 2510.02838, section 8.1.
DEFAULT_SLO_SCALE = 2.5


class ExpectedTimes:
    """Stage times of requests and legs. Stages that have run are reported to the stage times, and to the
    replanner if there is one.

    `slo_scale`: per model, the default SLO as a multiple of the latency at the optimal degrees."""

    def __init__(
        self, times: StageTimes, pool: WorkerPool, slo_scale: Mapping[str, float], replanner: Replanner | None
    ) -> None:
        self._times = times
        self._pool = pool
        self._slo_scale = dict(slo_scale)
        self._replanner = replanner
        self.shares = StepShares()
        """The times of steps by quality, relative to the steps that the profile has."""

    def slo_s(self, spec: RequestSpec) -> float:
        """Section 8.1: a multiple of the latency with every stage at its optimal degree and no waiting."""
        if spec.slo_s is not None:
            return spec.slo_s
        # The quality changes nothing: what is made in less work is to be ready sooner, not to have less time.
        whole = replace(spec, step_share=spec.token_ratio)
        return self._slo_scale.get(spec.model, DEFAULT_SLO_SCALE) * estimate_work(self._times, whole).seconds

    def set_slo_scale(self, model: str, scale: float) -> None:
        """Set the SLO scale of the requests that arrive from now on."""
        self._slo_scale[model] = scale

    def step_s(self, specs: Sequence[RequestSpec], degree: int) -> float:
        """Seconds of one denoising step of these requests together."""
        return batch_seconds(self._times, specs, Stage.DIFFUSE, degree, 1)

    def encode_s(self, specs: Sequence[RequestSpec], degree: int) -> float:
        return batch_seconds(self._times, specs, Stage.ENCODE, degree)

    def decode_s(self, specs: Sequence[RequestSpec], degree: int) -> float:
        return batch_seconds(self._times, specs, Stage.DECODE, degree)

    def decode_degree(self, model: str, leg: Leg) -> int:
        """The number of a leg's workers that run C; 1 for a leg without C."""
        return stage_degree(self._times, model, Stage.DECODE, len(leg.workers)) if Stage.DECODE in leg.stages else 1

    def leg_s(self, leg: Leg, run: Run, batch: int) -> float:
        """Seconds of a leg for this number of members, loads of what its workers do not hold yet included."""
        model, degree = run.spec.model, len(leg.workers)
        replicas = [Replica(model, stage) for stage in leg.stages]
        load_s = max(
            sum(self._times.load_seconds(model, replica.stage) for replica in self._pool.list_missing(worker, replicas))
            for worker in leg.workers
        )
        # A leg of E may have the members of other runs too.
        specs = [request.spec for request in run.requests][:batch] if run.is_mixed else [run.spec] * batch
        return load_s + sum(batch_seconds(self._times, specs, stage, degree, run.num_steps) for stage in leg.stages)

    def observe(self, plan: DispatchPlan, run: Run, spans: Sequence[StageSpan], num_steps: int) -> None:
        """Learn from a plan that has done `num_steps` steps of D."""
        spec = run.spec
        kind = self._pool.kind_of(plan.leader, plan.model)
        batch = len(plan.members) * spec.num_outputs
        for span in spans:
            degree = stage_degree(self._times, spec.model, span.stage, plan.degree)
            calls = num_steps if span.stage is Stage.DIFFUSE else 1
            # Of a mixed batch nobody knows which size took the time.
            if calls and not run.is_mixed and not self._observe_share(run, span, degree, batch, calls):
                self._times.observe(spec.model, span.stage, spec.shape, degree, batch, span.seconds / calls)
            if self._replanner is not None and kind is not None:
                ran = replace(span, workers=plan.workers[:degree])  # logs of version 0.1 do not name them
                self._replanner.stage_finished(StageReport(spec.model, kind, spec.shape, len(plan.members), ran))

    def _observe_share(self, run: Run, span: StageSpan, degree: int, batch: int, steps: int) -> bool:
        """Learn from the steps of requests that need not be exact or have further input images. False for spans of
        others."""
        kinds = {(request.spec.quality, request.spec.token_ratio) for request in run.requests}
        if span.stage is not Stage.DIFFUSE or kinds <= {("exact", 1.0)}:
            return False
        if len(kinds) > 1:
            return True  # nobody knows whose steps took the time
        spec = run.spec
        whole_s = self._times.seconds(spec.model, span.stage, spec.shape, degree, batch)
        if whole_s > 0:
            self.shares.observe(spec, span.seconds / steps / whole_s, steps)
        return True
