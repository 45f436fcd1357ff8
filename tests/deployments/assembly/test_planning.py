"""From the configuration to the planners: every policy can be named, written placements win, replanning is as asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.assembly.planning import assemble_service, list_workers
from deployments.assembly.profiles import make_cost_model
from deployments.config.app import AppArgs
from deployments.config.planning import ReplanArgs
from dispatch import DispatchOptions
from dispatch.policies import POLICIES, make_policy
from placement import ReplanOptions
from profiler import ProfileRow, ProfileTable, WeightsRow, write_table
from tridentserve.errors import ConfigError
from tridentserve.plans import PlacementPlan, StageSpan
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.events import (
    Finish,
    Place,
    RequestArrived,
    RunPlan,
    StageFinished,
    Tick,
    WorkerJoined,
)
from tridentserve.scheduling.scheduler import Scheduler
from tridentserve.stages import Stage

LOAD = {"model": "tiny-sd3", "width": 512, "height": 512, "num_inference_steps": 8}


def planned(**changes: Any) -> tuple[PlacementPlan, Scheduler]:
    args = AppArgs.model_validate(
        {
            "models": [{"name": "tiny-sd3", "tiny": "sd3", "window_s": 20}],
            "cluster": {"workers_per_node": 4, "memory_mb": 1024},
            "expected_load": [LOAD],
            **changes,
        }
    )
    specs, times = list_workers(args, ["node"] * 4), make_cost_model(args)
    planners = assemble_service(args, times, specs)
    for spec in specs:
        planners.scheduler.on(WorkerJoined(spec, 0), 0.0)
    return planners.placement, planners.scheduler


def finished(scheduler: Scheduler, request: RequestSpec) -> bool:
    """Carry out all plans of a request as they come; whether it ends with a result."""
    effects = scheduler.on(RequestArrived(request), 0.0)
    for now_s in range(1, 100):
        effects = effects or scheduler.on(Tick(), now_s)
        if any(isinstance(effect, Finish) for effect in effects):
            return True
        runs, effects = [effect.plan for effect in effects if isinstance(effect, RunPlan)], []
        for plan in runs:
            spans = tuple(StageSpan(stage, now_s, now_s + 0.5) for stage in plan.stages)
            effects += scheduler.on(StageFinished(plan.plan_id, spans), now_s + 0.5)
    return False


@pytest.mark.parametrize("placement", ["auto", ["EDC", "EDC", "EDC", "EDC"]])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves(policy: str, placement: Any) -> None:
    _, scheduler = planned(dispatch={"policy": policy}, placement=placement)
    assert finished(scheduler, RequestSpec("r", "tiny-sd3", Shape(512, 512), 8, slo_s=1e3))


def test_a_written_placement_wins_over_that_of_the_policy() -> None:
    written, _ = planned(dispatch={"policy": "tetriserve"}, placement=["EDC", "EDC", "DC", "E"])
    assert [written.describe(f"n0w{i}") for i in range(4)] == [f"tiny-sd3:{kind}" for kind in ("EDC", "EDC", "DC", "E")]
    own, _ = planned(dispatch={"policy": "b6"})
    assert {own.describe(worker_id) for worker_id in own.replicas} == {"tiny-sd3:E", "tiny-sd3:D", "tiny-sd3:C"}


@pytest.mark.parametrize("policy", POLICIES)
def test_which_policies_need_no_load(policy: str) -> None:
    args = AppArgs.model_validate(
        {"models": [{"name": "tiny-sd3", "tiny": "sd3"}], "cluster": {"workers_per_node": 4, "memory_mb": 1024}}
        | {"placement": ["EDC"] * 4}
    )
    specs, times = list_workers(args, ["node"] * 4), make_cost_model(args)
    if not POLICIES[policy].needs_load:
        assert make_policy(policy, times, specs, [], DispatchOptions()).placement is None
    else:
        with pytest.raises(ConfigError):
            make_policy(policy, times, specs, [], DispatchOptions())


def places(scheduler: Scheduler, seconds: int = 60) -> bool:
    """True when heavy denoising, more than one worker can do, brings another placement."""
    for now_s in range(seconds):
        for index in range(4):
            spec = RequestSpec(f"{now_s}-{index}", "tiny-sd3", Shape(512, 512), 28)
            scheduler.on(RequestArrived(spec), float(now_s))
        if any(isinstance(effect, Place) for effect in scheduler.on(Tick(), now_s + 0.5)):
            return True
    return False


SKEWED = {"placement": ["D", "E", "C", "C"]}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (SKEWED, False),
        ({**SKEWED, "replan": {"enabled": True}}, True),
        ({**SKEWED, "replan": {"enabled": True, "check_interval_s": 1000}}, False),
        ({**SKEWED, "replan": {"enabled": True}, "dispatch": {"policy": "edf"}}, True),
        ({**SKEWED, "replan": {"enabled": False}}, False),
    ],
)
def test_the_placement_follows_the_load_where_it_should(changes: dict[str, Any], expected: bool) -> None:
    assert places(planned(**changes)[1]) == expected


def test_every_option_of_the_replanner_can_be_set() -> None:
    """Under its own name and with the same default."""
    ours = set(ReplanArgs.model_fields) - {"enabled"}
    assert ours == set(ReplanOptions.__dataclass_fields__)
    assert all(getattr(ReplanArgs(), name) == getattr(ReplanOptions(), name) for name in ours)


def test_a_policy_that_keeps_its_placement_is_not_replanned() -> None:
    with pytest.raises(ConfigError, match=r"^replan\.enabled: policy wo-switch keeps its first placement"):
        planned(dispatch={"policy": "wo-switch"}, replan={"enabled": True})


@pytest.mark.parametrize(
    ("dispatch", "members"),
    [
        ({"policy": "dit-serve"}, 4),
        ({"policy": "dit-serve", "max_batch": 2}, 2),
        ({}, 1),
        ({"max_batch": 3}, 3),
        ({"max_batch": "auto"}, 4),
    ],
)
def test_how_many_requests_share_steps(dispatch: dict[str, Any], members: int, tmp_path: Path) -> None:
    """Four requests for one worker, with a profile by which larger batches cost nothing more."""
    rows = tuple(
        ProfileRow("m", "cpu", stage, Shape(64, 64), 1, batch, 1.0 if stage is Stage.DIFFUSE else 0.1, 1, "modelled")
        for stage in Stage
        for batch in (1, 2, 3, 4)
    )
    weights = tuple(WeightsRow("m", stage, 1, "modelled") for stage in Stage)
    write_table(tmp_path / "own.csv", ProfileTable("own", rows, weights))
    args = AppArgs.model_validate(
        {
            "models": [{"name": "m", "tiny": "sd3"}],
            "cluster": {"workers_per_node": 1, "memory_mb": 512},
            "expected_load": [{"model": "m", "width": 64, "height": 64, "num_inference_steps": 4}],
            "profiles": [str(tmp_path / "own.csv")],
            "dispatch": dispatch,
        }
    )
    specs, times = list_workers(args, ["node"]), make_cost_model(args)
    scheduler = assemble_service(args, times, specs).scheduler
    scheduler.on(WorkerJoined(specs[0], 0), 0.0)
    for index in range(4):
        scheduler.on(RequestArrived(RequestSpec(f"r{index}", "m", Shape(64, 64), 4, slo_s=1e3)), 0.0)
    (run,) = (effect for effect in scheduler.on(Tick(), 0.0) if isinstance(effect, RunPlan))
    assert len(run.plan.members) == members
