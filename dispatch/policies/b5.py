"""B5, bucketed stage-level: a cluster for each stage, that of D in buckets as in B2, FIFO (section 8.1, appendix D.2).

E and C run on one worker each, so that their clusters are one bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.options import DispatchOptions
from dispatch.policies.greedy.buckets import buckets
from dispatch.policies.greedy.dispatcher import GreedyDispatcher
from dispatch.policies.greedy.orders import fifo
from dispatch.policies.greedy.placements import disaggregated
from dispatch.policies.greedy.stage_level import StageLevel
from dispatch.policies.greedy.work import WorkTimes
from dispatch.policies.policy import LoadLike, Policy
from tridentserve.cluster import WorkerSpec
from tridentserve.protocols import StageTimes
from tridentserve.stages import Stage


def b5(times: StageTimes, workers: Sequence[WorkerSpec], load: Sequence[LoadLike], options: DispatchOptions) -> Policy:
    placement = disaggregated(times, workers, load)
    primaries = [
        worker
        for worker in workers
        if any(replica.stage is Stage.DIFFUSE for replica in placement.replicas[worker.worker_id])
    ]
    bucket_of = buckets(WorkTimes(times, aligned=False), primaries, load, options.max_degree)
    dispatcher = GreedyDispatcher(times, options, order=fifo, level=StageLevel, buckets=bucket_of)
    return Policy("b5", dispatcher, placement, replanner_wanted=False, decode_order="fifo")
