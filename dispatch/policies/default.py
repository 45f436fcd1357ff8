"""The default: the integer program on the Orchestrator's placement, which follows the load; and wo-switch, where the
first placement stays (ablation of section 8.4), and wo-pooling, where placements are those of Algorithm 2."""

from __future__ import annotations

from collections.abc import Sequence

from dispatch.dispatcher import IlpDispatcher
from dispatch.options import DispatchOptions
from dispatch.policies.policy import LoadLike, Policy
from tridentserve.cluster import WorkerSpec
from tridentserve.protocols import StageTimes


def default(
    times: StageTimes, workers: Sequence[WorkerSpec], load: Sequence[LoadLike], options: DispatchOptions
) -> Policy:
    return Policy("default", IlpDispatcher(times, options), placement=None, replanner_wanted=True)


def wo_switch(
    times: StageTimes, workers: Sequence[WorkerSpec], load: Sequence[LoadLike], options: DispatchOptions
) -> Policy:
    return Policy("wo-switch", IlpDispatcher(times, options), placement=None, replanner_wanted=False)


def wo_pooling(
    times: StageTimes, workers: Sequence[WorkerSpec], load: Sequence[LoadLike], options: DispatchOptions
) -> Policy:
    dispatcher = IlpDispatcher(times, options)
    return Policy("wo-pooling", dispatcher, placement=None, replanner_wanted=True, one_pool=False)
