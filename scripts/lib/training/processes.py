"""Training by several processes of one machine: each computes the gradients of its share, and all take the same step.

On a CPU that other programs use too, processes of one thread each lose less time than threads of one process do, which
wait for each other in every operation.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def run_processes(number: int, train: Callable[..., None], *arguments: Any) -> None:
    """Call `train` in each of so many processes, which find each other; for one, in this one.

    Raises `torch.multiprocessing.ProcessRaisedException` where one of them fails.
    """
    if number == 1:
        train(*arguments)
        return
    with tempfile.TemporaryDirectory() as directory:
        arguments_of_each = (number, Path(directory) / "store", train, arguments)
        context: Any = spawn(_join, arguments_of_each, number, join=False)  # type: ignore[no-untyped-call]
        # Ctrl-C reaches all processes of the terminal: the others end by it after the step that they do together.
        while True:
            try:
                if context.join():
                    return
            except KeyboardInterrupt:
                continue


def _join(rank: int, number: int, store: Path, train: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=number)
    try:
        train(*arguments)
    finally:
        dist.destroy_process_group()


def get_rank() -> int:
    """The number of this process; the one with 0 writes states and figures."""
    return dist.get_rank() if dist.is_initialized() else 0


def count_processes() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace the gradients of this process by the mean over all processes."""
    if count_processes() == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= count_processes()
    for gradient, mean in zip(gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def compute_shared(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Apply a function that takes each row by itself and keeps its shape: each process computes its share of the rows,
    which are the same in all processes, and has all of the result."""
    processes = count_processes()
    if processes == 1:
        return function(rows)
    share = -(-len(rows) // processes)
    padded = torch.cat([rows, rows.new_zeros(share * processes - len(rows), *rows.shape[1:])])
    result = torch.empty_like(padded)
    dist.all_gather(list(result.chunk(processes)), function(padded.chunk(processes)[get_rank()]).contiguous())
    return result[: len(rows)]


def agree(wish: bool) -> bool:
    """True in all processes if it is in one."""
    if count_processes() == 1:
        return wish
    flag = torch.tensor(int(wish))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
