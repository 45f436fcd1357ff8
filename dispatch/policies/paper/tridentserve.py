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
it compares the speeds of the stages as the paper does, discounts chance, and asks what a switch costs and gains.
"""

from __future__ import annotations

from dispatch.policies.paper.deviations import NO_DEVIATION, PAPER_POLICY
from dispatch.policies.paper.variants import make_variant
from dispatch.policies.policy import Policy, PolicyContext, register_policy
from profiler.cost_model import LARGEST_BATCH


@register_policy(PAPER_POLICY, supports_units=True, default_max_batch=LARGEST_BATCH, runs_whole=True)
def make_paper(context: PolicyContext) -> Policy:
    return make_variant(NO_DEVIATION, context)
