"""The arguments of a plan's calls to its workers, and the event that their reports amount to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tridentserve.engine.live.client_requests import ClientRequest
from tridentserve.engine.live.messages import UNKNOWN_PEAK, ExpectedPeak, PlanReport
from tridentserve.errors import GroupError, ProfileError, WorkerError
from tridentserve.plans import DispatchPlan, WorkerId
from tridentserve.protocols import StageMemory
from tridentserve.requests import GenerationInputs, RequestSpec, Shape
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.estimation.plan_estimates import rank_peaks
from tridentserve.stages import Stage

# Kinds of plans whose memory is kept: model, stages, degree, size and outputs.
_MAX_KEPT_PEAKS = 1024


def select_inputs(
    plan: DispatchPlan, requests: Mapping[str, ClientRequest], worker_id: WorkerId
) -> dict[str, GenerationInputs]:
    """The inputs that a worker of a plan receives: only a worker that encodes needs their input images."""
    encodes = Stage.ENCODE in plan.stages and worker_id in plan.workers_of(Stage.ENCODE)
    return {name: request.inputs if encodes else request.inputs.without_images() for name, request in requests.items()}


class PeakEstimator:
    """Says what memory plans are expected to take. Requests of a load have few sizes: what was computed is kept."""

    def __init__(self, memory: StageMemory | None) -> None:
        """`memory` does not change; None where nothing is known."""
        self._memory = memory
        self._find = lru_cache(_MAX_KEPT_PEAKS)(self._compute)

    def estimate(self, plan: DispatchPlan, specs: Sequence[RequestSpec]) -> Sequence[ExpectedPeak]:
        """Expected bytes of activations on each worker of a plan for these requests, in rank order."""
        if self._memory is None or not specs:
            return (UNKNOWN_PEAK,) * plan.degree
        members = tuple([(spec.shape, spec.num_outputs) for spec in specs])
        return self._find(plan.model, plan.stages, plan.degree, members, specs[0].token_ratio)

    def _compute(
        self,
        model: str,
        stages: tuple[Stage, ...],
        degree: int,
        members: tuple[tuple[Shape, int], ...],
        token_ratio: float,
    ) -> tuple[ExpectedPeak, ...]:
        assert self._memory is not None
        try:
            plain, frugal = (
                rank_peaks(self._memory, model, stages, degree, members, frugal, token_ratio)
                for frugal in (False, True)
            )
        except ProfileError:
            return (UNKNOWN_PEAK,) * degree
        return tuple([ExpectedPeak(*peaks) for peaks in zip(plain, frugal, strict=True)])


def list_last_steps(plan: DispatchPlan, report: PlanReport) -> list[tuple[str, int]]:
    """The step after which the plan ended, of each member, in the form of a `ProgressNote`."""
    if report.taken_steps:
        return [(request_id, end) for request_id, (begin, end) in report.taken_steps.items() if end > begin]
    ended_with_d = plan.stages[-1] is Stage.DIFFUSE or report.paused_after is not None
    num_steps = plan.num_steps if report.paused_after is None else report.paused_after
    if report.outcome != "finished" or not ended_with_d or not num_steps:
        return []
    return [(member.request_id, member.steps[0] + num_steps) for member in plan.members if member.steps is not None]


async def collect_references(outputs: Any, num_outputs: Mapping[str, int]) -> dict[str, tuple[Any, ...]]:
    """References to the outputs of a plan, by request, from Ray's generator of them. Raises `WorkerError`."""
    # Only references: the outputs themselves need not pass through this process. A worker that dies before it has sent
    # all leaves an error in the place of one, and nothing for the others.
    found = {}
    for request_id, number in num_outputs.items():
        found[request_id] = tuple([await anext(outputs, None) for _ in range(number)])
        if None in found[request_id] or outputs.completed() in found[request_id]:
            raise WorkerError("the worker was lost before it had sent all outputs")
    return found


def build_plan_event(plan: DispatchPlan, reports: Sequence[PlanReport], offset_s: float) -> ev.Event:
    """The event that the reports of all workers of a plan, in rank order, amount to. The scheduler's time is the Unix
    clock's less `offset_s`."""
    failures = [report for report in reports if report.outcome == "failed"]
    if failures:
        errors = "; ".join(dict.fromkeys(report.error for report in failures))
        final = next((report for report in failures if not report.retry), None)
        if final is not None:
            return ev.PlanFailed(plan.plan_id, final.error, retry=False, code=final.code)
        return ev.PlanFailed(plan.plan_id, errors, workers=_find_faulty(plan, reports))
    leader = reports[0]
    if leader.outcome == "stopped":
        return ev.PlanStopped(plan.plan_id)
    spans = tuple(span.shift(-offset_s) for span in leader.spans)
    told = zip(plan.workers, (report.loras for report in reports), strict=True)
    loras = tuple((worker_id, held) for worker_id, held in told if held is not None)
    return ev.StageFinished(plan.plan_id, spans, _count_steps(leader), loras)


def _find_faulty(plan: DispatchPlan, reports: Sequence[PlanReport]) -> tuple[WorkerId, ...]:
    """The workers that may be at fault for the failure of a plan: those that say so, or all where each of them has seen
    no more than that their group failed."""
    told = zip(plan.workers, reports, strict=True)
    if faulty := tuple(worker_id for worker_id, report in told if report.may_be_worker):
        return faulty
    is_of_group = all(report.outcome == "failed" and report.code == GroupError.code for report in reports)
    return plan.workers if is_of_group else ()


def _count_steps(report: PlanReport) -> int | None:
    """The denoising steps that a plan did of each member; None where they are those of the plan."""
    ranges = iter(report.taken_steps.values())
    return next((end - begin for begin, end in ranges), report.paused_after)
