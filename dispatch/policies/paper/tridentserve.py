"""The paper's policy (TridentServe, arXiv 2510.02838, sections 5.2, 5.3 and 6, appendices C and E.1).

- Placement: Algorithm 2 with the Split and PackPerMachine of appendix C.1. Each request counts for its own first
  virtual replica, and these share the workers by the number of requests.
- Batches of equal requests are formed before the solve, at the size that is optimal for D; a batch does not wait to be
  full, counts once, and has the earliest deadline of its members.
- The program: efficient degrees and types with enough memory (C0), at most one group for each request (C1), no more
  workers than are idle (C2), and the rewards of `dispatch.policies.paper.rewards` (OBJ, C3). A group is taken from one
  node; where none has room the request waits for the next tick.
- D runs to its end. E and C run with D where its workers hold them, C on as many as are optimal; else on the
  auxiliaries that are idle, or free first. C waits there, first in, first out. Lone E that wait for a worker share a
  pass.

It is the default's dispatcher, with each of `Deviations` switched off. Not switched, as the paper says nothing else:
how blocks of idle workers are chosen within the nodes; that requests with the same work share a variable; that the
earliest deadline goes first among equals. The trigger of a new placement is the default's too (`placement.replanner`):
it compares the speeds of the stages as the paper does, and asks for more before it acts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from dispatch.candidates.candidate import MERGED_S, Candidate
from dispatch.candidates.program import DEFAULT_PROGRAM, Program, appraise_by_value
from dispatch.candidates.values import Appraisal
from dispatch.candidates.work import Work
from dispatch.dispatcher import IlpDispatcher
from dispatch.options import NO_BATCHES, DispatchOptions, ValueOptions
from dispatch.policies.paper.deviations import NO_DEVIATION, PAPER_POLICY, Deviations, parse_deviations
from dispatch.policies.paper.rewards import RewardAppraisal
from dispatch.policies.policy import Policy, PolicyContext, PolicySpec, register_policy

_MOST_IN_A_BATCH = 8
# Of a reward of 1000: less than any penalty for communication.
_ORDER_SHARE = 1e-6
# No D takes as long.
_WHOLE_S = 1e12


@register_policy(PAPER_POLICY, supports_units=True, default_max_batch=_MOST_IN_A_BATCH)
def make_paper(context: PolicyContext) -> Policy:
    return make_variant(NO_DEVIATION, context)


def find_variant(name: str) -> PolicySpec:
    """The paper's policy with the deviations that the name states (`parse_deviations`)."""
    deviations = parse_deviations(name)
    most = NO_BATCHES if deviations.batches else _MOST_IN_A_BATCH
    return PolicySpec(name, partial(make_variant, deviations), supports_units=True, default_max_batch=most)


def make_variant(deviations: Deviations, context: PolicyContext) -> Policy:
    """The paper's policy with some of the deviations."""
    program = Program(
        _Appraiser(deviations).appraise,
        DEFAULT_PROGRAM.order_share if deviations.values else _ORDER_SHARE,
        per_node=deviations.nodes,
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
        overdue_first=options.overdue_first and deviations.overdue,
        segment_s=options.segment_s if deviations.segments else _WHOLE_S,
        objective=replace(
            options.objective, hopeless_at_optimal=options.objective.hopeless_at_optimal and deviations.hopeless
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
        horizon_s: float,
        options: ValueOptions,
    ) -> Appraisal:
        left = self._limit(candidates, now_s)
        if self.deviations.values:
            return appraise_by_value(work, left, idle, now_s, horizon_s, options)
        return RewardAppraisal(work, left, idle, now_s, horizon_s, options, waits=self.deviations.foresight)

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
    return replace(
        candidate,
        encode_s=candidate.encode_s if candidate.encodes_there else 0.0,
        decode_s=candidate.decode_s if candidate.decodes_there else 0.0,
        encode_free_s=MERGED_S,
        decode_free_s=MERGED_S,
        earliest_start_s=now_s,
        load_s=0.0,
        condition_s=(0.0, 0.0),
        latents_s=(0.0, 0.0),
    )
