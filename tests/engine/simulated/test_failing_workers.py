"""Workers that live on while their plans fail, as with a broken device: others run the requests, with any policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.assembly.planning import assemble_service, list_service_workers
from deployments.assembly.service_times import make_service_times
from deployments.config.app import AppArgs
from tests.support.decision_log import read_log
from tridentserve.engine.simulated import FailingWorker, SimulatedEngine, SimulationOptions, SimulationResult
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling import events as ev

BAD = "n0w0"
SHAPE, STEPS, NUM_REQUESTS = Shape(256, 256), 28, 40


def serve(
    policy: str, num_workers: int, gap_s: float, failing: tuple[FailingWorker, ...], log: Path, **scheduler: object
) -> SimulationResult:
    """A service as it is configured; the first worker that an idle cluster would use is `node0/0`."""
    args = AppArgs.model_validate(
        {
            "models": [{"name": "m", "tiny": "sd3"}],
            "cluster": {"workers_per_node": num_workers, "device": "cpu", "memory_mb": 2000},
            "dispatch": {"policy": policy},
            "expected_load": [{"model": "m", "width": 256, "height": 256, "num_inference_steps": STEPS, "weight": 1}],
            **scheduler,
        }
    )
    times, specs = make_service_times(args), list_service_workers(args)
    planned = assemble_service(args, times, specs)
    options = SimulationOptions(failing=failing, decision_log=log, keep_plans=True, handoff_capacity_bytes=1 << 26)
    engine = SimulatedEngine(planned.scheduler, specs, planned.placement, times, options)
    requests = [RequestSpec(f"r{number}", "m", SHAPE, STEPS) for number in range(NUM_REQUESTS)]
    return engine.run((1 + gap_s * number, request) for number, request in enumerate(requests))


def list_effects(log: Path, kind: type[ev.SetAside]) -> list[ev.SetAside]:
    return [effect for entry in read_log(log) for effect in entry.effects if isinstance(effect, kind)]


@pytest.mark.parametrize(
    "policy", ["default", "edf", "b6", "tetriserve", "genserve", "dit-serve", "tridentserve-paper"]
)
@pytest.mark.parametrize(("num_workers", "gap_s"), [(2, 0.5), (2, 5.0), (8, 0.5)])
def test_a_worker_that_fails_each_plan_costs_no_request(
    policy: str, num_workers: int, gap_s: float, tmp_path: Path
) -> None:
    """It is always idle, and would be given all of them."""
    log = tmp_path / "log.jsonl"
    result = serve(policy, num_workers, gap_s, (FailingWorker(BAD),), log)
    assert result.outcomes == {"finished": NUM_REQUESTS}
    failed = [plan for plan in result.plans if plan.outcome == "failed"]
    assert failed
    assert {effect.worker_id for effect in list_effects(log, ev.SetAside)} <= {BAD}
