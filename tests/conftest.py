"""What all tests share: one Ray cluster and one cache of tiny models per session, one torch thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.waiting import PATIENCE_S

# How long an example takes says more of the machine than of the code. Every run has the same examples, but for those of
# `make fuzz`, which looks for new ones.
settings.register_profile("tridentserve", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("tridentserve")

# Before anything imports these: nothing is fetched, nothing is reported, no token file of Ray's turns anything on.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray warns of a change of defaults for GPUs otherwise.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for tiny models, empty at the start of the session."""
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """The session's Ray. Logical CPUs only: the machine has two cores."""
    import ray
    from ray._private import worker

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=True,  # the state API, and the Actors tab behind it
        log_to_driver=True,
        object_store_memory=512 << 20,
        configure_logging=False,
    )
    node: Any = worker._global_node
    processes = [info.process for infos in node.all_processes.values() for info in infos]
    yield
    ray.shutdown()
    for process in processes:  # Ray kills them but waits for none of them for long, and a busy machine takes its time.
        process.wait(PATIENCE_S)
