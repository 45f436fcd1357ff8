"""The memory of this machine, and the part of it that each CPU worker may have."""

from __future__ import annotations

import os
from pathlib import Path

# The limit of this process's control group, of the second and of the first version of Linux's.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# The rest is for the system, Ray, the replicas of the service and the host copies of weights.
_WORKERS_SHARE = 0.75


def share_host_bytes(num_workers: int) -> int:
    """Bytes for each of the workers of this machine."""
    return int(_WORKERS_SHARE * count_host_bytes() / num_workers)


def count_host_bytes() -> int:
    """Bytes of memory that the processes of this machine, or of this container, may use together."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    texts = [path.read_text(encoding="utf-8").strip() for path in _LIMITS if path.is_file()]
    return min([total, *(int(text) for text in texts if text.isdigit())])
