"""The options of a service's engine and workers. No torch, no Ray: planning and simulations read them too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from tridentserve.models.cache import cache_dir
from tridentserve.options import options
from tridentserve.scheduling.estimation.hot_groups import GROUP_BYTES
from tridentserve.scheduling.tick_pacer import TICK_S

TorchDevice = Literal["cpu", "cuda"]
Fetch = Literal["auto", "mapped", "peer", "host"]
Transport = Literal["nixl", "host"]


def choose_host_dir(cache: Path) -> Path:
    """The directory of host copies where no option names one."""
    return cache / "host"


def choose_compile_dir(cache: Path) -> Path:
    """The directory of compiled code where no option names one."""
    return cache / "compiled"


@options
class LoopOptions:
    """Options of the work that both engines do: they call the scheduler and write down what it decides."""

    tick_s: float = Field(default=TICK_S, gt=0, description="Shortest time between two ticks, in seconds.")
    decision_log: Path | None = Field(
        default=None,
        description="File to which all events and effects are written as JSON lines, for "
        "`scripts/replay_decisions.py`; without it none is written.",
    )


@options
class EngineOptions(LoopOptions):
    """Options of the live engine beyond those of the scheduler."""

    max_requests: int = Field(
        default=256,
        ge=1,
        description="Most unfinished requests that the service holds; it answers further ones with status 429.",
    )
    explain_last: int = Field(
        default=200,
        ge=0,
        description="Number of the latest requests whose decisions each scheduler keeps in memory, so that "
        "`GET /v1/requests/{id}/explain` can say why they were late; with 0 none are kept.",
    )
    max_result_age_s: float = Field(
        default=60,
        ge=0,
        description="Seconds for which the result of a finished request can be asked for again by its `request_id`.",
    )


@options
class WorkerOptions:
    """Options that each worker of a service is set up with."""

    torch_device: TorchDevice = Field(default="cpu", description="Kind of device that workers compute on.")
    num_threads: int = Field(default=1, ge=1, description="Number of torch threads of one worker.")
    max_denoising: int | None = Field(
        default=None,
        ge=1,
        description="Most workers of a node that denoise at once. Without it as many CPU workers do as there are cores "
        "for their threads, since more would get less done together; GPU workers all do.",
    )
    num_cpus: float = Field(default=0.1, gt=0, description="Number of Ray's logical CPUs that one worker reserves.")
    handoff_bytes: int = Field(
        default=64 << 20, gt=0, description="Size of the handoff buffer of one worker, in bytes."
    )
    handoff_transport: Transport = Field(
        default="nixl",
        description="Way in which tensors reach the next worker: `nixl` writes them straight into its handoff buffer "
        "and falls back to host memory where it cannot; `host` always goes through host memory.",
    )
    max_groups: int = Field(
        default=8,
        ge=2,
        description="Most process groups that one worker keeps open; one plan may use two. Beyond that number the "
        "least recently used one is closed.",
    )
    group_timeout_s: float = Field(
        default=60.0, gt=0, description="Longest time that a worker waits for the other members of a group, in seconds."
    )
    hang_timeout_s: float = Field(
        default=15.0,
        gt=0,
        description="Seconds beyond twice the slowest step of a plan so far, after which a worker that waits for "
        "another one of its group takes that one for hanging. While members may be compiling, and always as the "
        "longest time, `group_timeout_s` holds.",
    )
    fetch: Fetch = Field(
        default="auto",
        description="The source from which a worker gets weights. `mapped` uses the pages of the node's host copy "
        "as the weights (CPUs only); `peer` copies from a worker of the node that has them, else from the host "
        "copy; `host` copies from the host copy; `auto` is `mapped` on a CPU and `peer` on a GPU.",
    )
    block_bytes: int = Field(
        default=64 << 20,
        gt=0,
        description="Size of the blocks in which weights are moved, in bytes; a load needs that much memory in "
        "addition to the weights.",
    )
    lora_bytes: int = Field(
        default=512 << 20,
        ge=0,
        description="Most bytes of LoRAs that a worker keeps on its device between plans; the longest unused leave "
        "first, and all of them before weights do.",
    )
    host_dir: Path = Field(
        default_factory=lambda: choose_host_dir(cache_dir()),
        description="Directory in which each node keeps its one copy of all weights.",
    )
    compile_dir: Path = Field(
        default_factory=lambda: choose_compile_dir(cache_dir()),
        description="Directory in which each node keeps the code that torch.compile has made.",
    )

    def count_denoising(self) -> int | None:
        """Most workers of this machine that denoise at once, on the cores that this process may use; None: all."""
        if self.max_denoising is not None or self.torch_device != "cpu":
            return self.max_denoising
        return max(1, len(os.sched_getaffinity(0)) // self.num_threads)

    @property
    def group_bytes(self) -> int:
        """Bytes of one worker's memory that its process groups take."""
        return self.max_groups * GROUP_BYTES[self.torch_device]

    @property
    def reserve_bytes(self) -> int:
        """Bytes of one worker's memory that the handoff buffer and the process groups take."""
        return self.handoff_bytes + self.group_bytes
