"""Policies by dotted path: each request on the same number of workers from E to C, first come, first served.

So TetriServe's paper runs xDiT (arXiv 2510.01565, section 6.1), the baseline of each related system here.
"""

from __future__ import annotations

from dispatch.policies.greedy.dispatcher import GreedyDispatcher
from dispatch.policies.greedy.orders import fifo
from dispatch.policies.greedy.pipeline_level import PipelineLevel
from dispatch.policies.greedy.placements import co_locate
from dispatch.policies.policy import Policy, PolicyContext

FIXED_DEGREES = tuple(f"lib.evaluate.related_systems.fixed_degrees:make_sp{degree}" for degree in (1, 2, 4, 8))


def make_sp1(context: PolicyContext) -> Policy:
    return _make(context, 1)


def make_sp2(context: PolicyContext) -> Policy:
    return _make(context, 2)


def make_sp4(context: PolicyContext) -> Policy:
    return _make(context, 4)


def make_sp8(context: PolicyContext) -> Policy:
    return _make(context, 8)


def _make(context: PolicyContext, degree: int) -> Policy:
    dispatcher = GreedyDispatcher(context.times, context.options, fifo, PipelineLevel, target=lambda spec: degree)
    return Policy(dispatcher, co_locate(context.workers, context.load), replanner_wanted=False)
