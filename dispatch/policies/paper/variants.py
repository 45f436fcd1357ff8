"""Builds the paper's policy (`dispatch.policies.paper.tridentserve`), with any of the deviations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from dispatch.candidates.candidate import MERGED_S, Candidate
from dispatch.candidates.program import DEFAULT_PROGRAM, Program, appraise_by_value
from dispatch.candidates.values import Appraisal, Pressure
from dispatch.candidates.work import Work
from dispatch.dispatcher import IlpDispatcher
from dispatch.options import NO_BATCHES, DispatchOptions, ValueOptions
from dispatch.policies.paper.deviations import Deviations, parse_deviations
from dispatch.policies.paper.rewards import RewardAppraisal
from dispatch.policies.policy import Policy, PolicyContext, PolicySpec
from profiler.cost_model import LARGEST_BATCH

# Of a reward of 1000: less than any penalty for communication.
_ORDER_SHARE = 1e-6
# No D takes as long.
_WHOLE_S = 1e12


def find_variant(name: str) -> PolicySpec:
    """The paper's policy with the deviations that the name states (`parse_deviations`)."""
    deviations = parse_deviations(name)
    most = NO_BATCHES if deviations.batches else LARGEST_BATCH
    return PolicySpec(
        name,
        partial(make_variant, deviations),
        supports_units=True,
        default_max_batch=most,
        runs_whole=not deviations.segments,
    )


def make_variant(deviations: Deviations, context: PolicyContext) -> Policy:
    """The paper's policy with some of the deviations."""
    program = Program(
        _Appraiser(deviations).appraise,
        DEFAULT_PROGRAM.order_share if deviations.values else _ORDER_SHARE,
        per_node=deviations.nodes,
        urgent_decodes=deviations.decode,
        batches_first=not deviations.batches,
    )
    policy = Policy(
        IlpDispatcher(context.times, _choose_options(context.options, deviations), program),
        one_pool=deviations.pooling,
        all_together=deviations.together,
        shares_by_work=deviations.shares,
    )
    return policy if deviations.decode else replace(policy, decode_order="planned")


def _choose_options(options: DispatchOptions, deviations: Deviations) -> DispatchOptions:
    return replace(
        options,
        keep_free=options.keep_free and deviations.reserve,
        overdue_share=options.overdue_share if deviations.overdue else 0.0,
        gather_share=options.gather_share if deviations.gathering else 0.0,
        segment_s=options.segment_s if deviations.segments else _WHOLE_S,
        least_segment_s=options.least_segment_s if deviations.segments else _WHOLE_S,
        objective=replace(
            options.objective,
            hopeless_at_optimal=options.objective.hopeless_at_optimal and deviations.hopeless,
            calm=options.objective.calm if deviations.values and deviations.calm else None,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Appraiser:
    """Values or rewards of the candidates that the deviations leave."""

    deviations: Deviations

    def appraise(
        self,
        work: Work,
        candidates: Sequence[Candidate],
        idle: Sequence[int],
        now_s: float,
        pressure: Pressure,
        options: ValueOptions,
    ) -> Appraisal:
        left = self._limit(candidates, now_s)
        if self.deviations.values:
            return appraise_by_value(work, left, idle, now_s, pressure, options)
        return RewardAppraisal(work, left, idle, now_s, pressure, options, waits=self.deviations.foresight)

    def _limit(self, candidates: Sequence[Candidate], now_s: float) -> Sequence[Candidate]:
        if not self.deviations.apart:
            candidates = [candidate for candidate in candidates if not candidate.apart] or candidates
        if not self.deviations.degrees:
            candidates = [candidate for candidate in candidates if candidate.efficient] or candidates
        if not self.deviations.foresight:
            candidates = [see_primary_alone(candidate, now_s) for candidate in candidates]
        return candidates


def see_primary_alone(candidate: Candidate, now_s: float) -> Candidate:
    """The candidate as the paper's program sees it: the runtime of the stages that the primary holds, if it started
    now (section 6.2, T of a request, type and degree)."""
    runs_alone = candidate.encodes_there and candidate.decodes_there
    if runs_alone and candidate.earliest_start_s == now_s and not candidate.load_s:
        return candidate
    return candidate._replace(
        encode_s=candidate.encode_s if candidate.encodes_there else 0.0,
        decode_s=candidate.decode_s if candidate.decodes_there else 0.0,
        encode_free_s=MERGED_S,
        decode_free_s=MERGED_S,
        earliest_start_s=now_s,
        load_s=0.0,
        condition_s=(0.0, 0.0),
        latents_s=(0.0, 0.0),
    )
