"""A whole service in the Ray of this process, for scripts that measure or show one."""

from __future__ import annotations

import socket

from ray import serve

from deployments.app import build_app
from deployments.config.app import AppArgs


def start_service(args: AppArgs) -> str:
    """Start it on a free port of this machine; its address, once it can take requests. `serve.shutdown()` ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    serve.run(build_app(args), name="tridentserve", route_prefix="/")
    return f"http://127.0.0.1:{port}"
