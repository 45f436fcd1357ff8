"""The paper's placement: a virtual replica for each request's own first one, shares by number, and nothing together."""

from __future__ import annotations

from collections import Counter

import pytest

from deployments.assembly.options import ServiceOptions
from deployments.assembly.planning import assemble
from dispatch.policies import PolicyContext, find_policy
from dispatch.policies.paper.deviations import NAMES
from profiler import load_cost_model
from tridentserve.cluster import WorkerSpec
from tridentserve.load import LoadShare
from tridentserve.requests import Shape
from tridentserve.stages import PlacementType

TIMES = load_cost_model(["l20"], "NVIDIA L20")
WORKERS = [WorkerSpec(f"w{node}-{i}", f"n{node}", 48 * 10**9, "NVIDIA L20", i) for node in range(4) for i in range(8)]
# The second needs DC + E.
LOAD = [LoadShare("flux.1-dev", Shape(side, side), 4, weight) for side, weight in ((1024, 3.0), (3072, 1.0))]


def place(policy: str) -> Counter[PlacementType | None]:
    plan = assemble(ServiceOptions(policy=policy), TIMES, WORKERS, LOAD).placement
    return Counter(plan.type_of(worker.worker_id, "flux.1-dev") for worker in WORKERS)


def test_virtual_replicas_have_workers_by_the_number_of_their_requests() -> None:
    found = place("tridentserve-paper")
    assert set(found) == {PlacementType.EDC, PlacementType.DC, PlacementType.E}
    assert found[PlacementType.EDC] == 24


def test_by_work_the_larger_size_has_more() -> None:
    assert place("tridentserve-paper+shares")[PlacementType.EDC] < 16


def test_pooled_all_requests_use_one_virtual_replica() -> None:
    assert (
        len(
            {PlacementType.EDC, PlacementType.DC, PlacementType.ED, PlacementType.D}
            & set(place("tridentserve-paper+pooling"))
        )
        == 1
    )


def test_all_stages_are_on_every_worker_with_v0_alone() -> None:
    """As Algorithm 2 chooses it, not as a rule of its own."""
    small = LOAD[:1]
    plan = assemble(ServiceOptions(policy="tridentserve-paper"), TIMES, WORKERS, small).placement
    assert {plan.type_of(worker.worker_id, "flux.1-dev") for worker in WORKERS} == {PlacementType.EDC}


@pytest.mark.parametrize("name", NAMES)
def test_only_the_deviations_of_the_placement_change_it(name: str) -> None:
    context = PolicyContext(TIMES, WORKERS, LOAD, find_policy("default").resolve(ServiceOptions().dispatch))
    paper, changed = (
        find_policy(policy).make(context) for policy in ("tridentserve-paper", f"tridentserve-paper+{name}")
    )
    switches = [(p.one_pool, p.all_together, p.shares_by_work) for p in (paper, changed)]
    assert (switches[0] != switches[1]) is (name in ("pooling", "together", "shares"))
