"""Models that no GPU holds, end to end: weights divided among units of workers, from placement to last frame."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from deployments.assembly.options import ServiceOptions
from deployments.assembly.simulation import SimulationSetup, simulate
from deployments.validation.args import check_args
from dispatch import DispatchOptions
from dispatch.policies import POLICIES
from profiler import CostModel, read_shipped_table
from tests.support.decision_log import read_log
from tests.support.tables.steady_times import STEADY_TIMES
from tests.support.units import choose_units
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.options import WorkerOptions
from tridentserve.engine.simulated import SimulationOptions, SimulationResult, TimedRequest, WorkerFailure
from tridentserve.errors import PlacementError
from tridentserve.load import LoadShare
from tridentserve.plans import Replica, WorkerId
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.events import ReplicaLoaded
from tridentserve.stages import Stage
from tridentserve.testing import find_violations

WITH_UNITS = [name for name, spec in POLICIES.items() if spec.supports_units]

MODEL, GPU = "hunyuanvideo", "NVIDIA L20"
TIMES = partial(CostModel, [read_shipped_table("l20")], GPU)
# Steps of seconds, so that several degrees pay.
SHAPES = (Shape(960, 544, 17), Shape(960, 544, 33))
D, E = Replica(MODEL, Stage.DIFFUSE), Replica(MODEL, Stage.ENCODE)
RESERVE_BYTES = 512 * 2**20
HANDOFF_BYTES = RESERVE_BYTES - WorkerOptions().group_bytes


def cluster(nodes: int, memory_gb: float) -> list[WorkerSpec]:
    """Nodes of 8."""
    return [
        WorkerSpec(f"n{node}w{i}", f"n{node}", int(memory_gb * 1e9), GPU, i) for node in range(nodes) for i in range(8)
    ]


def trace(number: int = 40) -> list[TimedRequest]:
    draw, at_s, arrivals = random.Random(5), 0.0, []
    for i in range(number):
        at_s += draw.expovariate(0.5)
        arrivals.append((at_s, RequestSpec(f"r{i}", MODEL, draw.choice(SHAPES), draw.choice((4, 6)), slo_s=120.0)))
    return arrivals


def served(workers: Sequence[WorkerSpec], policy: str = "default", **options: object) -> SimulationResult:
    engine = SimulationOptions(keep_plans=True, **options)  # type: ignore[arg-type]
    dispatch = DispatchOptions(max_batch=2, time_limit_s=30.0)
    service = ServiceOptions(policy, dispatch, worker=WorkerOptions(handoff_bytes=HANDOFF_BYTES))
    return simulate(trace(), SimulationSetup(workers, TIMES, service, engine=engine))


def incomplete(result: SimulationResult, workers: Sequence[WorkerSpec], replica: Replica, unit: int) -> list[str]:
    """Plans whose workers do not hold all shards of a stage between them, a whole unit each time."""
    places = {worker.worker_id: worker.place for worker in workers}

    def is_whole(ids: Sequence[WorkerId]) -> bool:
        blocks: defaultdict[int, int] = defaultdict(int)
        for worker_id in ids:
            blocks[places[worker_id] // unit] += 1
        return set(blocks.values()) == {unit}

    plans = [plan for plan in result.plans if any(span.stage is replica.stage for span in plan.spans)]
    assert plans
    return [f"plan {plan.plan_id}: {plan.workers}" for plan in plans if not is_whole(plan.workers)]


@pytest.mark.parametrize("policy", WITH_UNITS)
def test_a_model_of_26_gb_is_served_by_gpus_of_24(policy: str) -> None:
    """HunyuanVideo's D is 13 B parameters in bfloat16."""
    workers = cluster(2, 24)
    result = served(workers, policy, jitter=0.1)
    assert result.outcomes == {"finished": 40}
    assert find_violations(result, workers) == []
    assert incomplete(result, workers, D, 2) == []
    assert {len(plan.workers) for plan in result.plans if any(s.stage is Stage.DIFFUSE for s in plan.spans)} <= {
        2,
        4,
        8,
    }


def test_e_and_d_are_both_divided_where_they_must_be() -> None:
    workers = cluster(3, 12)
    units = choose_units(TIMES(), [LoadShare(MODEL, shape, 4) for shape in SHAPES], workers, RESERVE_BYTES)
    assert units == {D: 4, E: 2}
    result = served(workers)
    assert result.outcomes == {"finished": 40}
    assert find_violations(result, workers) == []
    assert incomplete(result, workers, D, 4) == incomplete(result, workers, E, 2) == []
    again = served(workers)
    assert (result.plans, result.requests) == (again.plans, again.requests)


def test_a_worker_that_is_lost_takes_its_unit_with_it_until_it_is_back(tmp_path: Path) -> None:
    workers = cluster(2, 24)
    failures = tuple(WorkerFailure(5.0 + 9 * i, f"n0w{i}", 30.0) for i in range(4))
    result = served(workers, failures=failures, decision_log=tmp_path / "log.jsonl")
    assert result.outcomes == {"finished": 40}
    assert find_violations(result, workers) == []
    assert incomplete(result, workers, D, 2) == []
    assert result.counts.worker_losses == 4
    assert result.counts.retries > 0
    events = [decision.event for decision in read_log(tmp_path / "log.jsonl")]
    loads = [event for event in events if isinstance(event, ReplicaLoaded) and event.loaded == D]
    assert {load.num_bytes for load in loads} <= {13_000_000_000}


def test_what_no_node_and_no_policy_can_do_is_said() -> None:
    with pytest.raises(
        PlacementError, match=r"encode alone are 16000000000 .* 16 of them would hold them together, and no node"
    ):
        served(cluster(3, 2.5))
    with pytest.raises(PlacementError, match=r"diffuse alone are 26000000000 .* 2 of them .* needs `placement: auto`"):
        served(cluster(2, 24), policy="wo-stage-aware")


def test_a_live_service_refuses_what_only_several_workers_hold() -> None:
    """The tiny model's D weighs 5.2 MiB, and workers of 14 MiB have 5 for it: as `auto` plans it, and as pinned."""
    args = {
        "models": [{"name": "tiny-sd3", "tiny": "sd3", "limits": {"max_side": 256}}],
        "profiles": [STEADY_TIMES],
        "cluster": {"nodes": 1, "workers_per_node": 4, "memory_mb": 14},
        "handoff": {"capacity_mb": 1},
        "expected_load": [{"model": "tiny-sd3", "width": 256, "height": 256, "num_inference_steps": 4}],
    }
    (found,) = check_args({**args, "placement": "auto"})
    assert found.startswith(
        "args.placement: tiny-sd3: the weights of diffuse alone are 5489792 bytes and a worker has "
    )
    assert "4 of them would hold them together, which needs `placement: auto` and a policy that plans" in found
    pinned = check_args({**args, "placement": ["EDC"] * 4})
    assert pinned
    assert all("EDC workers have 5242880 bytes beside the handoff buffer and need" in line for line in pinned)
