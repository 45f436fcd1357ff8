"""The backends of torch's process groups. NCCL is not in all builds of torch, and is looked for where it is used."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup, ProcessGroupGloo

# No plan crosses a node.
LOOPBACK = "127.0.0.1"
# By default torch ends the process when a collective fails or takes too long. With this it aborts the communicator
# and nothing else (`CleanUpOnly` in torch's ProcessGroupNCCL.hpp): the plan fails, the worker lives.
_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")


def make_gloo(store: Any, rank: int, size: int, timeout_s: float) -> tuple[Any, Any]:
    """A backend for tensors in host memory, and its kind."""
    gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    gloo._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank, size, gloo), ProcessGroup.BackendType.GLOO


def make_nccl(store: Any, rank: int, size: int, timeout_s: float) -> tuple[Any, Any]:
    """A backend for tensors on a GPU, and its kind. It connects at the first collective."""
    from torch.distributed import ProcessGroupNCCL

    os.environ.setdefault(*_ERROR_HANDLING)
    nccl = ProcessGroupNCCL.Options()
    nccl._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupNCCL(store, rank, size, nccl), ProcessGroup.BackendType.NCCL
