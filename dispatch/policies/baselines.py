"""The six baselines of TridentServe (arXiv 2510.02838, section 8.1 and appendix D.2).

| name | resources are allocated to | placement of the stages   | degree of D                            | order |
|------|----------------------------|---------------------------|----------------------------------------|-------|
| B1   | whole pipelines, static    | all on every worker       | half the optimal one of the largest    | FIFO  |
| B2   | whole pipelines, bucketed  | all on every worker       | that of the bucket                     | FIFO  |
| B3   | whole pipelines, dynamic   | all on every worker       | the optimal one                        | FIFO  |
| B4   | whole pipelines, dynamic   | all on every worker       | the optimal one                        | SRTF  |
| B5   | stages, bucketed           | a cluster for each stage  | that of the bucket                     | FIFO  |
| B6   | stages, dynamic            | a cluster for each stage  | the optimal one                        | SRTF  |

A bucket is a part of the cluster that serves one degree; a request goes to the bucket of its optimal degree. FIFO is
first in, first out; SRTF is shortest remaining time first, with aging. Decodes of B5 and B6 wait in one queue for all
auxiliaries; in `b6-planned` each waits at its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dispatch.policies.greedy.buckets import assign_buckets
from dispatch.policies.greedy.dispatcher import GreedyDispatcher
from dispatch.policies.greedy.orders import fifo, srtf
from dispatch.policies.greedy.pipeline_level import PipelineLevel
from dispatch.policies.greedy.placements import co_locate, disaggregate
from dispatch.policies.greedy.stage_level import StageLevel
from dispatch.policies.greedy.work import WorkTimes
from dispatch.policies.policy import Policy, PolicyContext, register_policy
from tridentserve.load import LoadShare
from tridentserve.protocols import StageTimes
from tridentserve.stages import Stage


@register_policy("b1", needs_load=True, one_load=True, runs_whole=True)
def make_b1(context: PolicyContext) -> Policy:
    degrees = choose_static_degrees(context.times, context.load)
    return _make_for_pipelines(
        context,
        GreedyDispatcher(
            context.times, context.options, fifo, PipelineLevel, target=lambda spec: degrees.get(spec.model, 1)
        ),
    )


@register_policy("b2", needs_load=True, one_load=True, runs_whole=True)
def make_b2(context: PolicyContext) -> Policy:
    work = WorkTimes(context.times, aligned=True)
    bucket_of = assign_buckets(work, context.workers, context.load, context.options.max_degree)
    return _make_for_pipelines(
        context, GreedyDispatcher(context.times, context.options, fifo, PipelineLevel, buckets=bucket_of)
    )


@register_policy("b3", needs_load=True, runs_whole=True)
def make_b3(context: PolicyContext) -> Policy:
    return _make_for_pipelines(context, GreedyDispatcher(context.times, context.options, fifo, PipelineLevel))


@register_policy("b4", needs_load=True, runs_whole=True)
def make_b4(context: PolicyContext) -> Policy:
    return _make_for_pipelines(context, GreedyDispatcher(context.times, context.options, srtf, PipelineLevel))


@register_policy("b5", needs_load=True, one_load=True, runs_whole=True)
def make_b5(context: PolicyContext) -> Policy:
    """E and C run on one worker each, so that each of their clusters is one bucket."""
    placement = disaggregate(context.times, context.workers, context.load)
    primaries = [
        worker
        for worker in context.workers
        if any(replica.stage is Stage.DIFFUSE for replica in placement.replicas[worker.worker_id])
    ]
    work = WorkTimes(context.times, aligned=False)
    bucket_of = assign_buckets(work, primaries, context.load, context.options.max_degree)
    dispatcher = GreedyDispatcher(context.times, context.options, fifo, StageLevel, buckets=bucket_of)
    return Policy(dispatcher, placement, replanner_wanted=False, decode_order="fifo")


@register_policy("b6", needs_load=True, runs_whole=True)
def make_b6(context: PolicyContext) -> Policy:
    dispatcher = GreedyDispatcher(context.times, context.options, srtf, StageLevel)
    placement = disaggregate(context.times, context.workers, context.load)
    return Policy(dispatcher, placement, replanner_wanted=False, decode_order="shortest")


@register_policy("b6-planned", needs_load=True, runs_whole=True)
def make_b6_planned(context: PolicyContext) -> Policy:
    """B6 whose C waits at the worker that was chosen with D, first in, first out, as every plan of the paper does
    (sections 5.3 and 6.2). B6 orders requests "within disaggregated clusters" (D.2), which may mean either."""
    return replace(make_b6(context), decode_order="planned")


def _make_for_pipelines(context: PolicyContext, dispatcher: GreedyDispatcher) -> Policy:
    """Stock pipelines on every worker, which run out of memory where they do not fit."""
    placement = co_locate(context.workers, context.load)
    return Policy(dispatcher, placement, replanner_wanted=False, decodes_in_tiles=False)


def choose_static_degrees(times: StageTimes, load: Sequence[LoadShare]) -> dict[str, int]:
    """The degree of each model of the load in B1: half the optimal degree of its largest size, so that even that one
    meets its deadline and no request wastes much."""
    largest: dict[str, LoadShare] = {}
    for share in load:
        if share.model not in largest or share.shape.tokens > largest[share.model].shape.tokens:
            largest[share.model] = share
    return {
        model: max(1, times.optimal_degree(model, Stage.DIFFUSE, share.shape) // 2) for model, share in largest.items()
    }
