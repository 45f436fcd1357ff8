"""B6, dynamic stage-level: a cluster for each stage, D at its optimal degree, shortest remaining time first with aging.

Section 8.1, appendix D.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.options import DispatchOptions
from dispatch.policies.greedy.dispatcher import GreedyDispatcher
from dispatch.policies.greedy.orders import srtf
from dispatch.policies.greedy.placements import disaggregated
from dispatch.policies.greedy.stage_level import StageLevel
from dispatch.policies.policy import LoadLike, Policy
from tridentserve.cluster import WorkerSpec
from tridentserve.protocols import StageTimes


def b6(times: StageTimes, workers: Sequence[WorkerSpec], load: Sequence[LoadLike], options: DispatchOptions) -> Policy:
    dispatcher = GreedyDispatcher(times, options, order=srtf, level=StageLevel)
    placement = disaggregated(times, workers, load)
    return Policy("b6", dispatcher, placement, replanner_wanted=False, decode_order="shortest")
