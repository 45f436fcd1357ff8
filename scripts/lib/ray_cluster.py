"""The Ray cluster that a script runs on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from deployments.serve.ingress import list_ingress_settings


@contextmanager
def run_ray_cluster(num_cpus: int, address: str | None = None) -> Iterator[None]:
    """A cluster of this process with `num_cpus` logical CPUs, which ends with the block. With `address`, the script
    joins the cluster there ("auto": the one of the environment variable RAY_ADDRESS) and leaves it running."""
    if address:
        ray.init(address=address, log_to_driver=False)
    else:
        for name, value in list_ingress_settings().items():
            os.environ.setdefault(name, value)
        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=num_cpus)
    try:
        yield
    finally:
        ray.shutdown()
