"""A whole service on this machine, for scripts that measure or show one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray import serve

from deployments.app import build_app
from deployments.config.app import AppArgs

# Logical ones: workers and deployments ask for less than one each.
_NUM_CPUS = 4


@contextmanager
def run_local_service(args: AppArgs) -> Iterator[str]:
    """Start Ray and the service on a free port; yields its address once it takes requests. Both end with the block."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=_NUM_CPUS)
    try:
        yield _start_service(args)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def _start_service(args: AppArgs) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    serve.run(build_app(args), name="tridentserve", route_prefix="/")
    return f"http://127.0.0.1:{port}"
