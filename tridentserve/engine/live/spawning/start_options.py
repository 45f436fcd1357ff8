"""Options with which Ray starts the processes that compute: forked or not, and with which use of freed memory."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import ray

from tridentserve.engine.live.spawning import forked_start
from tridentserve.process.heap import list_heap_variables

# The entries of Ray's `runtime_env` that choose the interpreter of processes.
_INTERPRETERS = frozenset(("py_executable", "pip", "uv", "conda", "container", "image_uri", "nsight", "rocprof_sys"))


def list_start_options(has_gpu: bool) -> dict[str, Any]:
    """Options of Ray for an actor or task that computes with torch. None where it has a GPU (what imports do to CUDA
    before a fork was not tried). On a CPU it keeps the memory that torch frees, and its process is forked, but for two
    cases: the application has an interpreter of its own, or Ray has several machines, as the command is known to be
    there on this one only."""
    if has_gpu:
        return {}
    environment: dict[str, Any] = {"env_vars": list_heap_variables()}
    own = _INTERPRETERS & set(ray.get_runtime_context().runtime_env)
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    if not own and sum(node["Alive"] for node in nodes) == 1:
        environment["py_executable"] = shlex.join([sys.executable, "-I", "-S", forked_start.__file__])
    return {"runtime_env": environment}
