"""Policies by name: the default, the paper's baselines and ablations, policies of related systems, and a simple one.

A policy is a dispatcher with the placement that it stands for. All are pure, and run in the live and the simulated
engine.
"""

from dispatch.policies.greedy.placements import co_locate, disaggregate
from dispatch.policies.policy import Policy, PolicyContext, PolicyFactory, PolicySpec, register_policy
from dispatch.policies.registry import POLICIES, find_policy, make_policy

__all__ = [
    "POLICIES",
    "Policy",
    "PolicyContext",
    "PolicyFactory",
    "PolicySpec",
    "co_locate",
    "disaggregate",
    "find_policy",
    "make_policy",
    "register_policy",
]
