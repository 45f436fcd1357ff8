"""The choice between processes that are forked (`forked_start`) and those that import all by themselves."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import ray

from tridentserve.engine.live.spawning import forked_start

# The entries of Ray's `runtime_env` that choose the interpreter of processes.
_INTERPRETERS = frozenset(("py_executable", "pip", "uv", "conda", "container", "image_uri", "nsight", "rocprof_sys"))


def list_start_options(has_gpu: bool) -> dict[str, Any]:
    """Options of Ray for an actor or task that computes with torch, so that its process is forked. None of them where
    it has a GPU (what imports do to CUDA before a fork was not tried), where the application has an interpreter of its
    own, and where Ray has several machines: the command is known to be there on this one only."""
    own = _INTERPRETERS & set(ray.get_runtime_context().runtime_env)
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    if has_gpu or own or sum(node["Alive"] for node in nodes) > 1:
        return {}
    return {"runtime_env": {"py_executable": shlex.join([sys.executable, "-I", "-S", forked_start.__file__])}}
