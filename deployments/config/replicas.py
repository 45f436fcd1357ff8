"""Options of the loads of weights into workers, of the state checkpoints that limit what a lost worker costs, and of
workers that fail without being lost."""

from __future__ import annotations

from pydantic import Field

from deployments.config.base import MEBIBYTES, Args, LocalPath, make_option
from tridentserve.engine.options import Fetch, WorkerOptions
from tridentserve.scheduling.scheduler import SchedulerOptions


class ReplicasArgs(Args):
    """Options of the way in which a worker gets the weights that a plan needs and that it does not hold."""

    fetch: Fetch = make_option(WorkerOptions, "fetch")
    block_mb: int = make_option(
        WorkerOptions,
        "block_bytes",
        MEBIBYTES,
        "Size of the blocks in which weights are moved, in MiB; a load needs that much memory in addition to the "
        "weights.",
    )
    lora_mb: int = make_option(
        WorkerOptions,
        "lora_bytes",
        MEBIBYTES,
        "Most MiB of LoRAs that a worker keeps on its device between plans; the longest unused leave first, and all of "
        "them before weights do.",
    )
    host_dir: LocalPath | None = Field(
        default=None,
        description="Directory in which each node keeps its one copy of all weights; without it `host` in `cache_dir`. "
        "GPUs load fastest from a tmpfs. Copies of other revisions and formats of a model are removed at the next "
        "start that serves it, unless a process uses them; those of models that are served no more are yours to "
        "delete.",
    )


class CheckpointsArgs(Args):
    """State checkpoints on other workers: what a lost worker costs."""

    every_s: float = make_option(SchedulerOptions, "checkpoint_s")
    every_steps: int | None = make_option(SchedulerOptions, "checkpoint_steps")


class FaultsArgs(Args):
    """Workers that live on while plans fail on them: when they are given no others for a while."""

    max_worker_failures: int | None = make_option(SchedulerOptions, "max_worker_failures")
    aside_s: float = make_option(SchedulerOptions, "aside_s")
