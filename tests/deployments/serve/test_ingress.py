"""HAProxy takes the connections, on ports that nobody else has."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from deployments.serve import ingress
from deployments.serve.ingress import list_ingress_settings


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Ray Serve brings HAProxy on Linux only")
def test_haproxy_listens_on_free_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        settings = [list_ingress_settings() for _ in range(3)]
        ports = [int(value) for one in settings for name, value in one.items() if name.endswith("_PORT")]
        assert len(ports) == 12
        assert taken.getsockname()[1] not in ports
    assert all(one["RAY_SERVE_ENABLE_HA_PROXY"] == "1" for one in settings)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Ray Serve brings HAProxy on Linux only")
def test_haproxy_runs_without_splice() -> None:
    settings = list_ingress_settings()
    command = [settings["RAY_SERVE_HAPROXY_BINARY_PATH"], "-v"]
    shown = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.startswith("HAProxy version")
    for wrong in ({}, {"TRIDENTSERVE_HAPROXY": command[0]}):
        refused = subprocess.run(command, env=wrong, capture_output=True, text=True, timeout=60)
        assert refused.returncode > 0
        assert "TRIDENTSERVE_HAPROXY" in refused.stderr


def test_without_haproxy_the_proxies_of_serve_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "find_spec", lambda name: None)
    assert list_ingress_settings() == {}
