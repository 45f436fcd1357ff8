"""B1, static pipeline-level: one degree for all requests of a model, FIFO (section 8.1, appendix D.2; as xDiT serves).

The degree is half of the optimal one of the largest size, so that even the largest meets its SLO and none wastes much.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.options import DispatchOptions
from dispatch.policies.greedy.dispatcher import GreedyDispatcher
from dispatch.policies.greedy.orders import fifo
from dispatch.policies.greedy.pipeline_level import PipelineLevel
from dispatch.policies.greedy.placements import co_located
from dispatch.policies.policy import LoadLike, Policy
from tridentserve.cluster import WorkerSpec
from tridentserve.protocols import StageTimes
from tridentserve.stages import Stage


def b1(times: StageTimes, workers: Sequence[WorkerSpec], load: Sequence[LoadLike], options: DispatchOptions) -> Policy:
    degrees = static_degrees(times, load)
    dispatcher = GreedyDispatcher(
        times, options, order=fifo, level=PipelineLevel, target=lambda spec: degrees.get(spec.model, 1)
    )
    return Policy("b1", dispatcher, co_located(workers, load), replanner_wanted=False, decodes_in_tiles=False)


def static_degrees(times: StageTimes, load: Sequence[LoadLike]) -> dict[str, int]:
    """The degree of each model of the load."""
    largest: dict[str, LoadLike] = {}
    for kind in load:
        if kind.model not in largest or kind.shape.tokens > largest[kind.model].shape.tokens:
            largest[kind.model] = kind
    return {
        model: max(1, times.optimal_degree(model, Stage.DIFFUSE, kind.shape) // 2) for model, kind in largest.items()
    }
