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
_APP = "tridentserve"


@contextmanager
def run_local_serve() -> Iterator[str]:
    """Start Ray, and Serve on a free port, without an application; yields its address. Both end with the block."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=_NUM_CPUS)
    try:
        yield _start_serve()
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


@contextmanager
def deploy(args: AppArgs) -> Iterator[None]:
    """The service on a Serve that runs; it takes requests within the block, and is deleted after it."""
    serve.run(build_app(args), name=_APP, route_prefix="/")
    try:
        yield
    finally:
        serve.delete(_APP)


@contextmanager
def run_local_service(args: AppArgs) -> Iterator[str]:
    """Start Ray, Serve and the service; yields its address once it takes requests. All end with the block."""
    with run_local_serve() as url, deploy(args):
        yield url


def _start_serve() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    return f"http://127.0.0.1:{port}"
