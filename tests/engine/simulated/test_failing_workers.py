"""Workers that live on while their plans fail, as with a broken device: others run the requests, with any policy."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from deployments.assembly.planning import assemble_service, list_service_workers
from deployments.assembly.service_times import make_service_times
from deployments.config.app import AppArgs
from dispatch.policies.registry import POLICIES
from tests.support.decision_log import read_log
from tests.support.tables.steady_times import STEADY_TIMES
from tridentserve.engine.simulated import FailingWorker, SimulatedEngine, SimulationOptions, SimulationResult
from tridentserve.plans import WorkerId
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling import events as ev

SHAPE, STEPS, NUM_REQUESTS = Shape(256, 256), 28, 40


def serve(
    policy: str, num_workers: int, gap_s: float, failing: tuple[FailingWorker, ...], log: Path
) -> SimulationResult:
    """A service as it is configured, on one node."""
    args = AppArgs.model_validate(
        {
            "models": [{"name": "m", "tiny": "sd3", "profile_as": "tiny-sd3"}],
            "profiles": [STEADY_TIMES],
            "cluster": {"workers_per_node": num_workers, "device": "cpu", "memory_mb": 2000},
            "dispatch": {"policy": policy},
            "expected_load": [{"model": "m", "width": 256, "height": 256, "num_inference_steps": STEPS, "weight": 1}],
        }
    )
    times, specs = make_service_times(args), list_service_workers(args)
    planned = assemble_service(args, times, specs)
    options = SimulationOptions(failing=failing, decision_log=log, keep_plans=True, handoff_capacity_bytes=1 << 26)
    engine = SimulatedEngine(planned.scheduler, specs, planned.placement, times, options)
    requests = [RequestSpec(f"r{number}", "m", SHAPE, STEPS) for number in range(NUM_REQUESTS)]
    return engine.run((1 + gap_s * number, request) for number, request in enumerate(requests))


def list_aside(log: Path) -> list[ev.SetAside]:
    return [effect for entry in read_log(log) for effect in entry.effects if isinstance(effect, ev.SetAside)]


# These have a cluster for each stage, of which each needs a worker.
_NEED_MORE = {"b5", "b6", "b6-planned"}


def find_replaceable(result: SimulationResult) -> WorkerId:
    """The worker with most plans among those all of whose stages others hold too."""
    held = result.placements[0][1].replicas
    used = Counter(worker_id for plan in result.plans for worker_id in plan.workers)
    return next(
        worker_id
        for worker_id, _ in used.most_common()
        if all(any(one in held[other] for other in held if other != worker_id) for one in held[worker_id])
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_workers", "gap_s"), [(2, 0.5), (8, 0.5)])
def test_a_worker_that_fails_each_plan_costs_no_request(
    policy: str, num_workers: int, gap_s: float, tmp_path: Path
) -> None:
    """It is always idle, and would be given all of them."""
    if policy in _NEED_MORE and num_workers == 2:
        num_workers = 4
    bad = find_replaceable(serve(policy, num_workers, gap_s, (), tmp_path / "healthy.jsonl"))
    result = serve(policy, num_workers, gap_s, (FailingWorker(bad),), tmp_path / "log.jsonl")
    assert result.outcomes == {"finished": NUM_REQUESTS}
    failed = [plan for plan in result.plans if plan.outcome == "failed"]
    assert 3 <= len(failed) < 10, "others are given what follows"
    assert {effect.worker_id for effect in list_aside(tmp_path / "log.jsonl")} == {bad}


def test_so_do_two_of_eight_that_begin_to_fail_under_load(tmp_path: Path) -> None:
    """Each request may fail on both."""
    failing = (FailingWorker("n0w0", 1.2), FailingWorker("n0w3", 1.7, 40.0))
    result = serve("default", 8, 0.05, failing, tmp_path / "log.jsonl")
    assert result.outcomes == {"finished": NUM_REQUESTS}
    assert {effect.worker_id for effect in list_aside(tmp_path / "log.jsonl")} == {"n0w0", "n0w3"}


def test_a_worker_that_works_again_is_given_plans_again(tmp_path: Path) -> None:
    result = serve("default", 2, 5.0, (FailingWorker("n0w0", 0.0, 60.0),), tmp_path / "log.jsonl")
    assert result.outcomes == {"finished": NUM_REQUESTS}
    changes = [(effect.until_s is None, effect.reason) for effect in list_aside(tmp_path / "log.jsonl")]
    assert [is_back for is_back, _ in changes] == [False, True] * (len(changes) // 2)
    assert changes[-1] == (True, "it is tried again")
    assert any(plan.outcome == "finished" and plan.workers == ("n0w0",) for plan in result.plans)
