"""The common parts of all tests: one Ray cluster and one cache of tiny models per session, one torch thread."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pulp
import pytest
from hypothesis import HealthCheck, settings

from deployments.serve.ingress import list_ingress_settings
from dispatch.options import DispatchOptions
from dispatch.solver import ilp
from tests.support.waiting import PATIENCE_S, RAY_TOO_SLOW

# The time of an example says more of the machine than of the code. Every run has the same examples, but for those of
# `make fuzz`, which looks for new ones.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("tridentserve", _UNTIMED, max_examples=50, derandomize=True)
settings.register_profile("fuzz", _UNTIMED, max_examples=1000, print_blob=True)
settings.load_profile("tridentserve")

# Before anything imports these: nothing is fetched, nothing is reported, no token file of Ray's turns anything on.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray warns of a change of defaults for GPUs otherwise.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# The proxy notices a dead replica in seconds (the default takes over 20).
os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")
# Its controller looks around ten times a second by default, which takes 7 % of a core for as long as the tests run.
os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")
# As `make serve` has it.
for name, value in list_ingress_settings().items():
    os.environ.setdefault(name, value)
# Ray gives its workers niceness 15: they give way to programs of niceness 0 that use all cores.
os.environ.setdefault("RAY_worker_niceness", "0")
# On a busy machine, what Ray waits for takes longer than it would wait.
for limit in ("SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "SERVE_PROXY_READY_CHECK_TIMEOUT_S", "gcs_server_port_wait_time_s"):
    os.environ.setdefault(f"RAY_{limit}", "120")
os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")
# A shell's settings of other clusters, directories and proxies are not for the tests.
for name in ("RAY_ADDRESS", "TRIDENTSERVE_CACHE", *(f"{kind}_proxy" for kind in ("http", "https", "all"))):
    os.environ.pop(name, None)
    os.environ.pop(name.upper(), None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--requests-seed", default="", help="any text: gives tests/e2e/test_exactness.py other random requests"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the order of the tests of a module that tells one scene where the tests are shuffled."""
    scenes: dict[Path, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("in_order"):
            scenes.setdefault(item.path, []).append(item)
    told = {path: iter(sorted(scene, key=_place_in_module)) for path, scene in scenes.items()}
    items[:] = [next(told[item.path]) if item.get_closest_marker("in_order") else item for item in items]


def _place_in_module(item: pytest.Function) -> tuple[int, str]:
    return item.function.__code__.co_firstlineno, item.name


@pytest.fixture(scope="module", autouse=True)
def _spared_objects() -> None:
    """Spare the collector what there is before a module's tests, mostly imported code: a full collection would visit
    some million objects, and the profiler asks for one between any two measurements."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _patient_solver() -> Iterator[None]:
    """Solves end at a time of the wall clock. The usual limit, which a busy machine may reach, is lifted: what is found
    does not depend on the machine. Limits that no machine keeps are kept."""
    usual = ilp._make_solver

    def make(options: DispatchOptions) -> pulp.LpSolver:
        is_usual = options.time_limit_s > 1e-3
        return usual(replace(options, time_limit_s=PATIENCE_S) if is_usual else options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ilp, "_make_solver", make)
        yield


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory for tiny models, empty at the start of the session."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """The session's Ray. Logical CPUs only: the machine has two cores."""
    import ray
    from ray._private import worker

    def start() -> None:
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=True,  # the state API, and the Actors tab behind it
            log_to_driver=True,
            object_store_memory=512 << 20,
            configure_logging=False,
            _system_config={"metrics_report_interval_ms": 1000},  # tests wait for what is reported
        )

    for _ in range(3):
        try:
            start()
            break
        except Exception as error:
            if RAY_TOO_SLOW not in str(error):
                raise
            ray.shutdown()
    else:
        start()
    node: Any = worker._global_node
    processes = [info.process for infos in node.all_processes.values() for info in infos]
    yield
    ray.shutdown()
    for process in processes:  # Ray kills them but waits for none of them for long, and a busy machine takes its time.
        process.wait(PATIENCE_S)
