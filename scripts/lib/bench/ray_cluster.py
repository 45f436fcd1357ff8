"""The Ray cluster that a benchmark without a service runs on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def run_ray_cluster(num_cpus: int) -> Iterator[None]:
    """A cluster of this process with `num_cpus` logical CPUs, which ends with the block. Where the environment variable
    RAY_ADDRESS names a cluster that runs already, the benchmark joins that one and leaves it running."""
    address = os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, log_to_driver=False)
    else:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=num_cpus)
    try:
        yield
    finally:
        ray.shutdown()
