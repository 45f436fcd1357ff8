"""The policies by name. To add one: its factory here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dispatch.options import DispatchOptions
from dispatch.policies.ablations.wo_scheduler import wo_scheduler
from dispatch.policies.ablations.wo_stage_aware import wo_stage_aware
from dispatch.policies.b1 import b1
from dispatch.policies.b2 import b2
from dispatch.policies.b3 import b3
from dispatch.policies.b4 import b4
from dispatch.policies.b5 import b5
from dispatch.policies.b6 import b6
from dispatch.policies.default import default, wo_pooling, wo_switch
from dispatch.policies.edf import edf
from dispatch.policies.policy import LoadLike, Policy, PolicyFactory
from dispatch.policies.related.dit_serve import dit_serve
from dispatch.policies.related.genserve import genserve
from dispatch.policies.related.patchedserve import patchedserve
from dispatch.policies.related.tetriserve import tetriserve
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError
from tridentserve.protocols import StageTimes

POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {
        "default": default,
        "b1": b1,
        "b2": b2,
        "b3": b3,
        "b4": b4,
        "b5": b5,
        "b6": b6,
        "wo-switch": wo_switch,
        "wo-pooling": wo_pooling,
        "wo-stage-aware": wo_stage_aware,
        "wo-scheduler": wo_scheduler,
        "tetriserve": tetriserve,
        "genserve": genserve,
        "dit-serve": dit_serve,
        "patchedserve": patchedserve,
        "edf": edf,
    }
)


# Those that plan with units of workers that hold a stage's weights together (`placement.units`). For the others such a
# model does not fit.
POLICIES_WITH_UNITS = ("default", "wo-switch", "wo-pooling", "wo-scheduler", "edf")


def make_policy(
    name: str,
    times: StageTimes,
    workers: Sequence[WorkerSpec],
    load: Sequence[LoadLike],
    options: DispatchOptions | None = None,
) -> Policy:
    """The policy for this cluster and the load that is expected there (what hand-made placements are sized by).

    Raises `ConfigError` for an unknown name or a load without work, `PlacementError` where the cluster is too small,
    and `ProfileError` for a model or size of the load that is not profiled.
    """
    if name not in POLICIES:
        raise ConfigError(f"{name!r} is no policy; use one of {', '.join(POLICIES)}")
    if not workers:
        raise ConfigError(f"policy {name} needs a cluster; give at least one worker")
    return POLICIES[name](times, workers, load, options or DispatchOptions())
