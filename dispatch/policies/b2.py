"""B2, bucketed pipeline-level: buckets of one degree each, a request goes to that of its optimal degree, FIFO within.

Section 8.1, appendix D.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.options import DispatchOptions
from dispatch.policies.greedy.buckets import buckets
from dispatch.policies.greedy.dispatcher import GreedyDispatcher
from dispatch.policies.greedy.orders import fifo
from dispatch.policies.greedy.pipeline_level import PipelineLevel
from dispatch.policies.greedy.placements import co_located
from dispatch.policies.greedy.work import WorkTimes
from dispatch.policies.policy import LoadLike, Policy
from tridentserve.cluster import WorkerSpec
from tridentserve.protocols import StageTimes


def b2(times: StageTimes, workers: Sequence[WorkerSpec], load: Sequence[LoadLike], options: DispatchOptions) -> Policy:
    placement = co_located(workers, load)
    bucket_of = buckets(WorkTimes(times, aligned=True), workers, load, options.max_degree)
    dispatcher = GreedyDispatcher(times, options, order=fifo, level=PipelineLevel, buckets=bucket_of)
    return Policy("b2", dispatcher, placement, replanner_wanted=False, decodes_in_tiles=False)
