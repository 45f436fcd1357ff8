"""A simulation has the options that ship: a simulation without options has those of a service without any."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.assembly.options import ServiceOptions, describe_options, format_options, make_service_options
from deployments.assembly.simulation import SimulationSetup, assemble_simulation, load_times, make_cluster_options
from deployments.config.app import AppArgs, HandoffArgs
from deployments.config.base import MEBIBYTES, list_option_keys
from dispatch import DispatchOptions
from dispatch.policies import POLICIES, find_policy, make_policy
from placement.cluster_file import ClusterSpec, NodeGroup
from profiler import CostModel, read_shipped_table
from tridentserve.cluster import WorkerSpec
from tridentserve.engine.options import EngineOptions, WorkerOptions
from tridentserve.engine.simulated import SimulationOptions
from tridentserve.errors import ConfigError
from tridentserve.load import LoadShare
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.scheduler import SchedulerOptions

MINIMAL: dict[str, Any] = {
    "models": [{"name": "m", "tiny": "sd3"}],
    "cluster": {"workers_per_node": 4, "memory_mb": 1024},
}
LOAD = {"model": "m", "width": 512, "height": 512, "num_inference_steps": 8}


def service(**changes: Any) -> ServiceOptions:
    return make_service_options(AppArgs.model_validate({**MINIMAL, "expected_load": [LOAD], **changes}))


def test_a_service_without_options_is_what_ships(tmp_path: Path) -> None:
    shipped, configured = ServiceOptions(), service(cache_dir=str(tmp_path))
    assert configured == replace(
        shipped,
        scheduler=replace(shipped.scheduler, slo_scale={"m": 2.5}),
        worker=replace(shipped.worker, host_dir=tmp_path / "host", compile_dir=tmp_path / "compiled"),
    )


@pytest.mark.parametrize(("gpu", "reserve_bytes"), [("cpu", (64 + 8) << 20), ("NVIDIA L20", (64 + 8 * 128) << 20)])
def test_a_simulated_cluster_is_set_to_what_ships(gpu: str, reserve_bytes: int) -> None:
    cluster = ClusterSpec(groups=(NodeGroup(nodes=1, gpus_per_node=8, gpu=gpu, memory_gb=48),))
    device = {"device": "cuda", "device_name": gpu} if gpu != "cpu" else {}
    configured = service(cluster={**MINIMAL["cluster"], **device}, dispatch={"policy": "b1"})
    simulated = make_cluster_options(cluster, "b1")
    assert describe_options(simulated) == describe_options(configured)
    assert (simulated.policy, simulated.worker.reserve_bytes) == ("b1", reserve_bytes)
    assert format_options(simulated) == "options: as shipped (docs/configuration.md)"


def test_what_is_not_as_shipped_is_said() -> None:
    options = ServiceOptions(dispatch=DispatchOptions(max_batch=4), engine=EngineOptions(tick_s=0.5))
    assert format_options(options).endswith(", but dispatch.max_batch 4, engine.tick_s 0.5")
    assert json.loads(json.dumps(describe_options(options))) == describe_options(options)


@pytest.mark.parametrize(
    ("policy", "max_batch", "decode_order", "in_tiles"),
    [
        ("default", 1, "urgent", True),
        ("b1", 1, "urgent", False),
        ("b6", 1, "shortest", True),
        ("b6-planned", 1, "planned", True),
        ("tridentserve-paper", 8, "planned", True),
        ("genserve", 8, "urgent", True),
    ],
)
def test_a_simulation_says_what_its_policy_sets(policy: str, max_batch: int, decode_order: str, in_tiles: bool) -> None:
    cluster = ClusterSpec(groups=(NodeGroup(nodes=1, gpus_per_node=8, gpu="NVIDIA L20", memory_gb=48),))
    setup = SimulationSetup(
        cluster.list_workers(),
        load_times(cluster, ["l20"]),
        make_cluster_options(cluster, policy),
        engine=SimulationOptions(jitter=0.25),
    )
    described = assemble_simulation([(0.0, RequestSpec("r", "sd3-medium", Shape(512, 512), 20))], setup).describe()
    assert described["dispatch.max_batch"] == max_batch
    assert described["scheduler.decode_order"] == decode_order
    assert described["scheduler.slo_scale.default"] == 2.5
    assert described["simulation.decodes_in_tiles"] is in_tiles
    assert (described["simulation.jitter"], described["simulation.max_idle_s"]) == (0.25, 60.0)
    assert json.loads(json.dumps(described)) == described


def test_values_reach_the_rooms_in_their_units(tmp_path: Path) -> None:
    options = service(
        dispatch={"tick_ms": 35, "time_limit_ms": 7.5, "solver": "cbc", "max_degree": 2, "max_batch": 3},
        handoff={"capacity_mb": 5, "transport": "host"},
        replicas={"block_mb": 3, "host_dir": str(tmp_path)},
        checkpoints={"every_s": 0.5, "every_steps": 4},
        faults={"max_worker_failures": 5, "aside_s": 2.5},
        max_queued_requests=9,
        max_retries=1,
        max_result_age_s=4,
    )
    assert (options.engine.tick_s, options.dispatch.time_limit_s) == (0.035, 0.0075)
    assert (options.dispatch.solver, options.dispatch.max_degree, options.dispatch.max_batch) == ("cbc", 2, 3)
    assert (options.worker.handoff_bytes, options.worker.block_bytes) == (5 << 20, 3 << 20)
    assert (options.worker.handoff_transport, options.worker.host_dir) == ("host", tmp_path)
    assert (options.scheduler.checkpoint_s, options.scheduler.checkpoint_steps) == (0.5, 4)
    assert (options.scheduler.max_worker_failures, options.scheduler.aside_s) == (5, 2.5)
    assert (options.engine.max_requests, options.scheduler.max_retries, options.engine.max_result_age_s) == (9, 1, 4)


def test_keys_hold_whole_numbers_where_fields_do() -> None:
    keys = dict(list_option_keys(HandoffArgs, WorkerOptions))
    capacity = keys["capacity_mb"]
    assert (capacity.unit, capacity.make_default(), capacity.to_field(3)) == (MEBIBYTES, 64, 3 << 20)
    assert isinstance(capacity.make_default(), int)
    assert isinstance(capacity.to_field(3), int)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_max_batch_a_policy_has_its_own(policy: str) -> None:
    times = CostModel([read_shipped_table("l20")], "NVIDIA L20")
    workers = [WorkerSpec(f"w{i}", "n", 48 << 30, "NVIDIA L20", i) for i in range(8)]
    load = [LoadShare("sd3-medium", Shape(512, 512), 20)]
    own, four = (make_policy(policy, times, workers, load, DispatchOptions(max_batch=most)) for most in (None, 4))
    expected = find_policy(policy).default_max_batch
    in_batches = policy.startswith("dit-serve") or policy in ("genserve", "patchedserve", "tridentserve-paper")
    assert expected == (8 if in_batches else 1)
    for made, most in ((own, expected), (four, 4)):
        settings = getattr(made.dispatcher, "_options", None)
        assert settings is None or settings.max_batch == most


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SchedulerOptions(max_retries=-1), "max_retries is -1; "),
        (lambda: WorkerOptions(max_groups=1), "max_groups is 1; "),
        (lambda: EngineOptions(tick_s=float("inf")), "tick_s is inf; "),
        (lambda: DispatchOptions(max_degree=3), "max_degree is 3; a degree is a power of two"),
        (lambda: DispatchOptions(degree=3), "degree is 3; "),  # type: ignore[call-arg]
    ],
)
def test_options_are_checked_where_they_are_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
