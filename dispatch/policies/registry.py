"""Policies by name, or by a dotted path to code of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType

from dispatch.options import DispatchOptions
from dispatch.policies.dotted_path import is_dotted_path, load_policy
from dispatch.policies.paper.deviations import is_variant
from dispatch.policies.paper.variants import find_variant
from dispatch.policies.policy import Policy, PolicyContext, PolicySpec, list_policies
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError
from tridentserve.load import LoadShare
from tridentserve.protocols import StageTimes

# The modules of the policies that ship with TridentServe, in the order in which policies are listed. A new module is
# added here.
_SHIPPED = (
    "default",
    "baselines",
    "paper.tridentserve",
    "ablations",
    "related.tetriserve",
    "related.genserve",
    "related.dit_serve",
    "related.patchedserve",
    "edf",
    "segments",
)

for _module in _SHIPPED:
    import_module(f"dispatch.policies.{_module}")

POLICIES: Mapping[str, PolicySpec] = MappingProxyType(list_policies())


def find_policy(name: str) -> PolicySpec:
    """The policy of this name, with the deviations that it states (`tridentserve-paper+values`), or at this dotted path
    (`my_package.my_module:MyPolicy`, see docs/write-a-policy.md). Raises `ConfigError` that says what is wrong."""
    if name in POLICIES:
        return POLICIES[name]
    if is_variant(name):
        return find_variant(name)
    if is_dotted_path(name):
        return load_policy(name)
    raise ConfigError(
        f"{name!r} is no policy; use one of {', '.join(POLICIES)}, or a dotted path such as my_module:MyPolicy"
    )


def make_policy(
    name: str,
    times: StageTimes,
    workers: Sequence[WorkerSpec],
    load: Sequence[LoadShare],
    options: DispatchOptions | None = None,
) -> Policy:
    """Build the policy for this cluster and the load that is expected there.

    Raises `ConfigError` for an unknown name, a policy that cannot be built or a load without work, `PlacementError`
    where the cluster is too small, and `ProfileError` for a model or size of the load that is not profiled.
    """
    spec = find_policy(name)
    if not workers:
        raise ConfigError(f"policy {name} needs a cluster; give at least one worker")
    resolved = spec.resolve(options or DispatchOptions())
    return replace(spec.make(PolicyContext(times, workers, load, resolved)), name=name)
