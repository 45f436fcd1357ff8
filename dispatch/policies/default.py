"""The default policy: the integer program on the Orchestrator's placement, which follows the load."""

from __future__ import annotations

from dispatch.dispatcher import IlpDispatcher
from dispatch.policies.policy import Policy, PolicyContext, register_policy


@register_policy("default", supports_units=True)
def make_default(context: PolicyContext) -> Policy:
    return Policy(IlpDispatcher(context.times, context.options))
