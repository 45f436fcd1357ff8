"""Ports for services that tests start."""

from __future__ import annotations

import random
import socket

# Below those that Linux hands out itself (32,768 and up), so that no other socket is given one before the service
# listens there; above those of Ray's workers.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A port of loopback that nothing uses, another one for each caller."""
    draw = random.SystemRandom()  # Not the seeded one: other runs of the tests would draw the same.
    while True:
        port = draw.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
