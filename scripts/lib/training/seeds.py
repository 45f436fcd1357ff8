"""Seeds."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: object) -> int:
    """A seed of 63 bits that follows from its parts, the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
