"""What goes with the calls of a plan to its workers, and what their reports come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tridentserve.engine.live.client_requests import Job
from tridentserve.engine.live.fleet import PlanCall
from tridentserve.engine.live.messages import ExpectedPeak, PlanReport, StepNote
from tridentserve.errors import ProfileError, WorkerError
from tridentserve.plans import DispatchPlan, WorkerId
from tridentserve.protocols import StageTimes
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.estimation.plan_estimates import rank_peaks
from tridentserve.stages import Stage


def contents(plan: DispatchPlan, jobs: Mapping[str, Job], worker_id: WorkerId) -> dict[str, GenerationInputs]:
    """What a worker of a plan gets of its requests: only who encodes needs the picture that one starts from."""
    if Stage.ENCODE in plan.stages and worker_id in plan.workers_of(Stage.ENCODE):
        return {name: job.inputs for name, job in jobs.items()}
    return {name: replace(job.inputs, image=None) for name, job in jobs.items()}


def expected_peaks(times: StageTimes | None, plan: DispatchPlan, specs: Sequence[RequestSpec]) -> list[ExpectedPeak]:
    """Expected bytes of activations on each worker of a plan for these requests."""
    nobody_knows = [ExpectedPeak()] * plan.degree
    if times is None or not specs:
        return nobody_knows
    outputs = [spec.num_outputs for spec in specs]
    try:
        plain, frugal = (
            rank_peaks(times, plan.model, plan.stages, plan.degree, specs[0].shape, outputs, frugal)
            for frugal in (False, True)
        )
    except ProfileError:
        return nobody_knows
    return [ExpectedPeak(*peaks) for peaks in zip(plain, frugal, strict=True)]


def untold_steps(plan: DispatchPlan, report: PlanReport) -> list[StepNote]:
    """Of each member, the step after which the plan ended, which has no note of its own (see `StageWorker.run`)."""
    ended_with_d = plan.stages[-1] is Stage.DIFFUSE or report.paused_after is not None
    num_steps = plan.num_steps if report.paused_after is None else report.paused_after
    if report.outcome != "finished" or not ended_with_d or not num_steps:
        return []
    return [
        StepNote(member.request_id, member.steps[0] + num_steps) for member in plan.members if member.steps is not None
    ]


async def take_images(job: Job | None, call: PlanCall, num_images: int) -> None:
    """Give a job its pictures, which follow the report. Raises `WorkerError`."""
    # Only references: the pictures themselves need not pass through this process. A worker that dies before
    # it has sent all leaves an error in the place of one, and nothing for the others.
    images = [await anext(call, None) for _ in range(num_images)]
    if None in images or call.completed() in images:
        raise WorkerError("the worker was lost before it had sent all pictures")
    if job is not None:
        job.images = images


def outcome(plan: DispatchPlan, reports: Sequence[PlanReport], offset_s: float) -> ev.Event:
    """What the reports of all workers of a plan, in rank order, mean to the scheduler, whose time is the Unix clock's
    less `offset_s`."""
    failures = [report for report in reports if report.outcome == "failed"]
    if failures:
        errors = "; ".join(dict.fromkeys(report.error for report in failures))
        final = next((report for report in failures if not report.retry), None)
        if final is not None:
            return ev.PlanFailed(plan.plan_id, final.error, retry=False, code=final.code)
        return ev.PlanFailed(plan.plan_id, errors)
    leader = reports[0]
    if leader.outcome == "stopped":
        return ev.PlanStopped(plan.plan_id)
    spans = tuple(span.shifted(-offset_s) for span in leader.spans)
    return ev.StageFinished(plan.plan_id, spans, leader.paused_after)
