"""The policies that the default is compared with: the paper's baselines and ablations, and simple ones, by name.

A policy is a dispatcher with the placement that it stands for. All are pure, and run in the live and simulated engine.
"""

from dispatch.policies.policy import LoadLike, Policy, PolicyFactory
from dispatch.policies.registry import POLICIES, POLICIES_WITH_UNITS, make_policy

__all__ = ["POLICIES", "POLICIES_WITH_UNITS", "LoadLike", "Policy", "PolicyFactory", "make_policy"]
