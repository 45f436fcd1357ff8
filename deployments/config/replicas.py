"""How weights get into workers, and what is done against their loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deployments.config.base import Args, LocalPath


class ReplicasArgs(Args):
    """How a worker gets the weights that a plan needs and that it has not."""

    fetch: Literal["auto", "mapped", "peer", "host"] = Field(
        default="auto", description="where from; `auto`: `mapped` on a CPU, `peer` on a GPU"
    )
    block_mb: int = Field(default=64, ge=1, description="MiB that move at a time; a load takes so much more memory")
    host_dir: LocalPath | None = Field(
        default=None, description="folder of each node's one copy of all weights; None: `host` in `cache_dir`"
    )


class CheckpointsArgs(Args):
    """Copies of denoising states on other workers: what a lost worker costs."""

    every_s: float = Field(
        default=1.0, ge=0, description="seconds of denoising from one copy to the next; 0: no copies"
    )
    every_steps: int | None = Field(default=None, ge=1, description="denoising steps instead of seconds")
