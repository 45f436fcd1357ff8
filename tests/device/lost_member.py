"""Members of a group step together until one is killed. The others are told as workers are, and end as they do."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from tests.device.recording import RecordingDevice, use_recording_device
from tests.parallel.members import TIMEOUT_S, Member, Pool
from tridentserve.device import find_device
from tridentserve.errors import GroupError
from tridentserve.parallel import GroupCache, abandon, connect_store

logger = logging.getLogger(__name__)
RECORDING = "recording"


class DeviceWithGloo(RecordingDevice):
    """Like a GPU it has two groups, one for tensors and one for commands."""

    kind = "cpu"


def step_until_lost(member: Member, name: str, kind: str, port: int, lost: int) -> tuple[list[str], float]:
    """The errors of the plan that loses a member, and of the next one, and when the first of them was raised, by the
    clock that all processes of a machine share."""
    errors: list[str] = []
    with ExitStack() as stack:
        if kind == RECORDING:
            stack.enter_context(use_recording_device(DeviceWithGloo()))
            kind = "cpu"
        device = torch.device(find_device(kind).find_of_rank(member.rank))
        find_device(device).enter_thread()
        workers = tuple(f"w{rank}" for rank in range(member.size))
        cache = GroupCache(member.store, device, capacity=2, timeout_s=TIMEOUT_S)

        def listen() -> None:
            """The fleet tells each worker in another thread than that of its plans."""
            connect_store(port=port).wait([f"{name}: lost"])
            cache.abort_groups_of(workers[lost])

        told = stack.enter_context(ThreadPoolExecutor(max_workers=1)).submit(listen)
        try:
            step_without_end(cache, member, name, workers)
        except GroupError as error:
            ended_s = time.monotonic()
            cache.abandon(name, member.rank, use=1)
            errors.append(str(error))
        told.result()
        cache.drop_groups_of(workers[lost])
        try:
            cache.acquire(name, member.rank, member.size, 2, workers)
        except GroupError as error:
            errors.append(str(error))
    return errors, ended_s


def step_without_end(cache: GroupCache, member: Member, name: str, workers: tuple[str, ...]) -> None:
    group, step = cache.acquire(name, member.rank, member.size, 1, workers), 0
    while True:
        step = group.agree(step) + 1
        block = torch.full((1 << 16,), float(step), device=group.device)
        group.all_to_all([block] * group.size, [tuple(block.shape)] * group.size)
        group.confirm()
        if step == 3:
            member.store.set(f"{name}: rank {member.rank} steps", "")


def lose_member(pool: Pool, kind: str, size: int, lost: int) -> None:
    """Kill a member of a group of these devices. All others must have errors that name the group and the member.
    Logs the time from the kill until the last of them had the first one."""
    name = f"one of {size} is lost, {kind}"
    pool.post(step_until_lost, size, name, kind, pool.store.port, lost)
    pool.store.wait([f"{name}: rank {rank} steps" for rank in range(size)])
    killed_s = time.monotonic()
    pool.kill(lost)
    pool.store.set(f"{name}: lost", "")
    abandon(pool.store, name, lost, use=2)
    left = [rank for rank in range(size) if rank != lost]
    answers = pool.results(left)
    for rank, (errors, _) in zip(left, answers, strict=True):
        in_collective, at_next_plan = errors
        assert f"group '{name}@1' on rank {rank} of {size}" in in_collective or (
            f"group '{name}@1' has failed" in in_collective
        )
        assert at_next_plan == f"group '{name}': rank {lost} of {size} has given up"
    took_s = max(ended_s for _, ended_s in answers) - killed_s
    logger.info("%s: the last of %d members was free after %.3f s", kind, len(left), took_s)
