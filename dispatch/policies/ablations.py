"""The default without one of its parts: the ablations of TridentServe (arXiv 2510.02838, section 8.4), and others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dispatch.dispatcher import IlpDispatcher
from dispatch.policies.greedy.dispatcher import GreedyDispatcher
from dispatch.policies.greedy.orders import srtf
from dispatch.policies.greedy.stage_level import StageLevel
from dispatch.policies.policy import Policy, PolicyContext, register_policy
from tridentserve.plans import Replica, WorkerId
from tridentserve.protocols import Assignment, ClusterView, Decisions, Dispatcher, WorkerView
from tridentserve.requests import RequestSpec
from tridentserve.stages import Stage


@register_policy("wo-switch", supports_units=True)
def make_wo_switch(context: PolicyContext) -> Policy:
    """The first placement stays."""
    return Policy(IlpDispatcher(context.times, context.options), replanner_wanted=False)


@register_policy("wo-pooling", supports_units=True)
def make_wo_pooling(context: PolicyContext) -> Policy:
    """Placements are those of the paper's Algorithm 2; no ablation of the paper, which has no pooling."""
    return Policy(IlpDispatcher(context.times, context.options), one_pool=False, all_together=False)


@register_policy("wo-overdue", supports_units=True)
def make_wo_overdue(context: PolicyContext) -> Policy:
    """No request goes first because it is long overdue, so that some may starve; no ablation of the paper."""
    return Policy(IlpDispatcher(context.times, replace(context.options, overdue_share=0.0)))


@register_policy("wo-stage-aware")
def make_wo_stage_aware(context: PolicyContext) -> Policy:
    """All stages are given as many workers as D ("align all GPU demand with the Diffuse stage")."""
    return Policy(AlignedDispatcher(IlpDispatcher(context.times, context.options)))


@register_policy("wo-scheduler", supports_units=True, runs_whole=True)
def make_wo_scheduler(context: PolicyContext) -> Policy:
    """B6's greedy dispatcher takes the place of the integer program: shortest remaining time first, D at its optimal
    degree, on the primaries with the least communication."""
    return Policy(GreedyDispatcher(context.times, context.options, srtf, StageLevel))


@dataclass(frozen=True, slots=True)
class AlignedDispatcher:
    """Widens the E and C of what another dispatcher decides: C stays on all of D's workers where they hold it; E and C
    elsewhere take as many auxiliaries of one node as D has workers, or as many as there are."""

    inner: Dispatcher

    def decide(self, view: ClusterView) -> Decisions:
        decisions = self.inner.decide(view)
        if not decisions.assignments:
            return decisions
        twins = _find_twins(view.workers)
        return replace(decisions, assignments=tuple(_align(entry, twins) for entry in decisions.assignments))

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return self.inner.can_ever_run(spec, workers)


def _find_twins(workers: Sequence[WorkerView]) -> dict[WorkerId, list[WorkerView]]:
    """For each worker those of its node with the same replicas and memory, itself among them, first free first."""
    alike: defaultdict[tuple[str, int, frozenset[Replica]], list[WorkerView]] = defaultdict(list)
    for worker in sorted(workers, key=lambda view: (not view.idle, view.free_at_s, view.worker_id)):
        alike[worker.node_id, worker.memory_bytes, worker.replicas].append(worker)
    return {worker.worker_id: group for group in alike.values() for worker in group}


def _align(assignment: Assignment, twins: Mapping[WorkerId, list[WorkerView]]) -> Assignment:
    def widened(stage: Stage, leaders: tuple[WorkerId, ...]) -> tuple[WorkerId, ...]:
        if not leaders or stage in assignment.primary.stages:
            return leaders and assignment.diffuse
        others = [view.worker_id for view in twins[leaders[0]] if view.worker_id not in leaders]
        return (*leaders, *others)[: len(assignment.diffuse)]

    encode, decode = widened(Stage.ENCODE, assignment.encode), widened(Stage.DECODE, assignment.decode)
    widths = {stage: len(on) for stage, on in ((Stage.ENCODE, encode), (Stage.DECODE, decode)) if on}
    # The inner decision's last word stays the last: it says how that was found.
    inner, _, found_by = assignment.reason.rpartition(", ")
    return replace(
        assignment, encode=encode, decode=decode, reason=f"{inner}, {_describe_widths(widths, assignment)}, {found_by}"
    )


def _describe_widths(widths: Mapping[Stage, int], assignment: Assignment) -> str:
    """The part of a reason that describes the widths of E and C."""
    if all(width == len(assignment.diffuse) for width in widths.values()):
        return "all stages at its degree"
    return " and ".join(f"{stage.letter} on {width}" for stage, width in widths.items()) + " as no more hold it"
