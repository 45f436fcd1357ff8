"""B4, dynamic pipeline-level: as B3, but shortest remaining time first with aging (section 8.1, appendix D.2)."""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.options import DispatchOptions
from dispatch.policies.greedy.dispatcher import GreedyDispatcher
from dispatch.policies.greedy.orders import srtf
from dispatch.policies.greedy.pipeline_level import PipelineLevel
from dispatch.policies.greedy.placements import co_located
from dispatch.policies.policy import LoadLike, Policy
from tridentserve.cluster import WorkerSpec
from tridentserve.protocols import StageTimes


def b4(times: StageTimes, workers: Sequence[WorkerSpec], load: Sequence[LoadLike], options: DispatchOptions) -> Policy:
    dispatcher = GreedyDispatcher(times, options, order=srtf, level=PipelineLevel)
    return Policy("b4", dispatcher, co_located(workers, load), replanner_wanted=False, decodes_in_tiles=False)
