"""Ablation wo-scheduler: the default's placement, with B6's greedy dispatch in place of the integer program.

Section 8.4: shortest remaining time first, D at its optimal degree, on the primaries with the least communication.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.options import DispatchOptions
from dispatch.policies.greedy.dispatcher import GreedyDispatcher
from dispatch.policies.greedy.orders import srtf
from dispatch.policies.greedy.stage_level import StageLevel
from dispatch.policies.policy import LoadLike, Policy
from tridentserve.cluster import WorkerSpec
from tridentserve.protocols import StageTimes


def wo_scheduler(
    times: StageTimes, workers: Sequence[WorkerSpec], load: Sequence[LoadLike], options: DispatchOptions
) -> Policy:
    dispatcher = GreedyDispatcher(times, options, order=srtf, level=StageLevel)
    return Policy("wo-scheduler", dispatcher, placement=None, replanner_wanted=True)
