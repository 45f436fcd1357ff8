"""A whole service on this machine, for scripts that measure or show one."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from ray import serve

from deployments.app import build_app
from deployments.config.app import AppArgs
from lib.ray_cluster import run_ray_cluster

# Logical ones: workers and deployments ask for less than one each.
_NUM_CPUS = 4
# Of its own, so that a Serve that is joined keeps what it serves.
_APP = "tridentserve-script"


def add_serve_url(parser: argparse.ArgumentParser) -> None:
    """Add the option `--serve-url`, for `run_local_serve`."""
    parser.add_argument(
        "--serve-url",
        metavar="URL",
        help="put the service beside others, on the Serve that listens here, on the Ray cluster of RAY_ADDRESS; "
        "without it the script starts a Ray and a Serve of its own",
    )


@contextmanager
def run_local_serve(serve_url: str | None = None) -> Iterator[str]:
    """Start Ray, and Serve on a free port, without an application; yields the address at which `deploy` puts a service.
    Both end with the block. With `serve_url`, join the Serve that listens there, on the cluster of the environment
    variable RAY_ADDRESS, and leave both running."""
    with run_ray_cluster(_NUM_CPUS, "auto" if serve_url else None):
        try:
            yield f"{serve_url or _start_serve()}/{_APP}"
        finally:
            if not serve_url:
                serve.shutdown()  # type: ignore[no-untyped-call]


@contextmanager
def deploy(args: AppArgs) -> Iterator[None]:
    """The service on a Serve that runs; it takes requests within the block, and is deleted after it."""
    serve.run(build_app(args), name=_APP, route_prefix=f"/{_APP}")
    try:
        yield
    finally:
        serve.delete(_APP)


@contextmanager
def run_local_service(args: AppArgs, serve_url: str | None = None) -> Iterator[str]:
    """Start or join Ray and Serve, as `run_local_serve` does, and start the service; yields its address once it takes
    requests. All that was started ends with the block."""
    with run_local_serve(serve_url) as url, deploy(args):
        yield url


def _start_serve() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    return f"http://127.0.0.1:{port}"
