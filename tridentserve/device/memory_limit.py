"""The memory that a worker can be given on its device, beside the number that a configuration gives it."""

from __future__ import annotations

import logging

from tridentserve.byte_sizes import MIB
from tridentserve.cluster import BUDGET_SHARE
from tridentserve.device.compute_device import ComputeDevice
from tridentserve.errors import ConfigError

logger = logging.getLogger(__name__)


def check_budget(device: ComputeDevice, budget_bytes: int) -> None:
    """Refuse a worker more memory than its device has for it, and warn where hardly any is left. To be called before it
    makes process groups. Where processes share the memory, nothing is checked. Raises `ConfigError`."""
    memory = device.measure_memory()
    if memory is None:
        return
    available_bytes = memory.total_bytes - memory.outside_bytes
    advice = f"`auto`, or at most {int(BUDGET_SHARE * available_bytes) // MIB}, suits this device"
    found = f"{budget_bytes // MIB} MiB, and {device.name} has {available_bytes // MIB} MiB for a worker"
    if budget_bytes > available_bytes:
        taken = f"{memory.outside_bytes // MIB} of its {memory.total_bytes // MIB} MiB are taken"
        raise ConfigError(f"cluster.memory_mb: {found} ({taken}); {advice}")
    if budget_bytes > BUDGET_SHARE * available_bytes:
        logger.warning("cluster.memory_mb: %s, which leaves little for what nobody counts; %s", found, advice)
    else:
        logger.debug("cluster.memory_mb: %s", found)
