"""GenServe: images and videos on the same GPUs, video preempted and resized at step boundaries (arXiv 2604.04335)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatch.candidates.classes import by_deadline
from dispatch.policies.greedy.placements import co_locate
from dispatch.policies.greedy.work import count_steps_left
from dispatch.policies.policy import Policy, PolicyContext, register_policy
from dispatch.policies.related.image_schedule import ImageBatch
from dispatch.policies.related.video_rounds import Video, plan_round
from dispatch.policies.step_level.dispatcher import BatchCandidate, StepLevelDispatcher, StepTick
from dispatch.policies.step_level.worker_picker import WorkerPicker
from profiler.cost_model import LARGEST_BATCH
from tridentserve.protocols import (
    Assignment,
    ClusterView,
    Decisions,
    PendingRequest,
    Preemption,
    RunningRequest,
)
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch of waiting images and how it would run."""

    members: tuple[PendingRequest, ...]
    candidate: BatchCandidate


@register_policy("genserve", needs_load=True, default_max_batch=LARGEST_BATCH)
def make_genserve(context: PolicyContext) -> Policy:
    """The whole pipeline is on every worker, as in the paper."""
    dispatcher = GenServe(context.times, context.options)
    return Policy(dispatcher, co_locate(context.workers, context.load), replanner_wanted=False)


class GenServe(StepLevelDispatcher):
    """Slack-ranked preemption of videos, another degree of parallelism for them when GPUs are scarce or idle, images in
    batches by earliest deadline, decided together by a dynamic program (section 4 of the paper).

    A request of one frame is an image, one of more frames is a video. Images run on the narrowest degree that fits, to
    their end, as in the talk, whose parallelism is for videos. So where all requests are images, this policy is SP 1
    with batches, and a size that one GPU cannot make in time is late under any load: judge it on a mix with videos
    (`scripts/evaluate.py --related`). A video runs until it ends or is preempted: a paused one competes again at each
    call, so it resumes when its budget gets tight or when GPUs are idle. The source at hand is a talk on the paper: it
    states the candidates and the algorithm and leaves their scores open, so the scores are ours; see
    `dispatch.policies.related.video_rounds`. Left out: the limit of one paused video per GPU, as states here are in the
    handoff buffer. C runs on one worker as in the paper, yet on a worker of the video. The pools of a mixed cluster are
    planned one after the other.
    """

    def decide(self, view: ClusterView) -> Decisions:
        """Starts of image batches and videos, and preemptions of videos."""
        tick = self._build_tick(view)
        waiting = sorted(view.pending, key=by_deadline)
        assignments: list[Assignment] = []
        preemptions: list[Preemption] = []
        for index, pool in enumerate(tick.pools):
            picker = WorkerPicker(pool)
            able = [request for request in waiting if tick.find_batch_candidates([request], index)]
            running = [request for request in view.running if _is_preemptible(tick, index, request, picker)]
            if not able or not picker.num_idle + sum(len(request.diffuse) for request in running):
                continue
            made, stopped = _plan_pool(tick, index, picker, able, running)
            assignments += made
            preemptions += stopped
            served = {request_id for assignment in made for request_id in assignment.request_ids}
            waiting = [request for request in waiting if request.spec.request_id not in served]
        return Decisions(assignments=tuple(assignments), preemptions=tuple(preemptions))


def _plan_pool(
    tick: StepTick, pool: int, picker: WorkerPicker, able: Sequence[PendingRequest], running: Sequence[RunningRequest]
) -> tuple[list[Assignment], list[Preemption]]:
    """Stages 1 to 3 for one pool, and what of the plan can be done now; the rest follows when videos have yielded."""
    images = [request for request in able if request.spec.shape.num_frames == 1]
    paused = [request for request in able if request.spec.shape.num_frames > 1]
    batches = _form_batches(tick, pool, images)
    videos = [_describe_running_video(tick, pool, each, picker) for each in running]
    videos += [_describe_waiting_video(tick, pool, each) for each in paused]
    gpus = picker.num_idle + sum(len(request.diffuse) for request in running)
    scored = [_describe_image_batch(tick, batch) for batch in batches]
    round_s = max((max(batch.ends_s) for batch in scored), default=max((v.fastest_s for v in videos), default=0.0))
    plan = plan_round(videos, scored, gpus, round_s)
    assignments = _start_images(tick, picker, batches, plan.image_gpus)
    preemptions = [
        Preemption(
            each.spec.request_id,
            f"genserve: {'pause' if degree == 0 else f'degree {degree}'}, {video.slack_s:.2f} s of slack",
        )
        for each, video, degree in zip(running, videos, plan.degrees, strict=False)
        if not each.yielding and degree != len(each.diffuse)
    ]
    is_more_coming = bool(preemptions) or any(each.yielding for each in running)
    degrees = plan.degrees[len(running) :]
    for request, degree in sorted(zip(paused, degrees, strict=True), key=lambda pair: -pair[1]):
        if degree and (made := _start_video(tick, pool, picker, request, degree, is_more_coming)) is not None:
            assignments.append(made)
    return assignments, preemptions


def _is_preemptible(tick: StepTick, pool: int, request: RunningRequest, picker: WorkerPicker) -> bool:
    """A video in D, on workers of this pool, which could also start there, and may be stopped."""
    spec = request.spec
    in_diffuse = request.stage is Stage.DIFFUSE and spec.shape.num_frames > 1 and not spec.whole
    return in_diffuse and picker.holds(request.diffuse[0]) and bool(tick.find_candidates(spec, pool, encoded=True))


def _form_batches(tick: StepTick, pool: int, images: Sequence[PendingRequest]) -> list[_Batch]:
    """Images of one kind, earliest deadline first, as long as no request gets late because of the batch."""
    batches: list[_Batch] = []
    queues = tick.find_queues(images)
    for first in images:
        queue = queues[tick.kinds[first.spec.request_id]]
        if queue.pop(first.spec.request_id, None) is None:
            continue  # it is in the batch of one before it
        members = [first]
        degree = min(tick.find_batch_candidates(members, pool))
        tick.grow(members, queue.values(), pool, degree, strict=True)
        for member in members[1:]:
            del queue[member.spec.request_id]
        batches.append(_Batch(tuple(members), tick.find_batch_candidates(members, pool)[degree]))
    return batches


def _describe_image_batch(tick: StepTick, batch: _Batch) -> ImageBatch:
    return ImageBatch(
        degree=batch.candidate.degree,
        ends_s=tuple(tick.expected_finish_s(member, batch.candidate) - tick.now_s for member in batch.members),
        budgets_s=tuple(member.deadline_s - tick.now_s for member in batch.members),
    )


def _describe_running_video(tick: StepTick, pool: int, each: RunningRequest, picker: WorkerPicker) -> Video:
    """It may stay, be paused, go narrower, or wider by what is idle in its node. One that yields waits already."""
    candidates = tick.find_candidates(each.spec, pool, encoded=True)
    widest = len(each.diffuse) + picker.count_idle_in_node(each.diffuse[0])
    return Video(
        steps_left=max(each.spec.num_inference_steps - each.steps_done, 0),
        step_s={degree: candidate.step_s for degree, candidate in candidates.items() if degree <= widest},
        fastest_s=min(candidate.step_s for candidate in candidates.values()),
        budget_s=each.deadline_s - tick.now_s - next(iter(candidates.values())).decode.seconds,
        degree=0 if each.yielding else len(each.diffuse),
    )


def _describe_waiting_video(tick: StepTick, pool: int, request: PendingRequest) -> Video:
    candidates = tick.find_batch_candidates([request], pool)
    any_candidate = next(iter(candidates.values()))
    return Video(
        steps_left=count_steps_left(request),
        step_s={degree: candidate.step_s for degree, candidate in candidates.items()},
        fastest_s=min(candidate.step_s for candidate in candidates.values()),
        budget_s=request.deadline_s - tick.now_s - any_candidate.decode.seconds,
        encode_s=any_candidate.encode.seconds,
    )


def _start_images(tick: StepTick, picker: WorkerPicker, batches: Sequence[_Batch], gpus: int) -> list[Assignment]:
    """Batches in their order onto the idle workers, as far as the plan's share for images goes."""
    assignments: list[Assignment] = []
    for batch in batches:
        degree, number = batch.candidate.degree, len(batch.members)
        if degree <= gpus and (workers := picker.take(degree)) is not None:
            gpus -= degree
            reason = f"genserve: {number} image{'s' * (number != 1)} at degree {degree}"
            assignments.append(tick.build_assignment(batch.members, batch.candidate, workers, reason))
    return assignments


def _start_video(
    tick: StepTick, pool: int, picker: WorkerPicker, request: PendingRequest, degree: int, is_more_coming: bool
) -> Assignment | None:
    """Start a video at the plan's degree, or narrower where idle workers lie apart and no others are about to come."""
    candidates = tick.find_batch_candidates([request], pool)
    for width in sorted(candidates, reverse=True):
        may_use = width == degree or (width < degree and not is_more_coming)
        if may_use and (workers := picker.take(width)) is not None:
            slack_s = request.deadline_s - tick.expected_finish_s(request, candidates[width])
            reason = f"genserve: video at degree {width}, {slack_s:.2f} s of slack at that degree"
            return tick.build_assignment([request], candidates[width], workers, reason)
    return None
