"""Chooses the steps after which running plans save state checkpoints, and the workers that keep them.

A request whose worker is lost repeats the steps since its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection

from tridentserve.plans import CheckpointSteps, WorkerId
from tridentserve.scheduling.runs.run import Run
from tridentserve.scheduling.workers.worker_pool import WorkerPool


class CheckpointSchedule:
    """Chooses after which steps a plan's states are saved, and on which worker, the keeper: not one of its own, on
    another node where there is one, and in turn, so that all workers keep about the same number."""

    def __init__(self, pool: WorkerPool, every_s: float, every_steps: int | None = None) -> None:
        """`every_s`: seconds of denoising between two checkpoints; 0: none are made.
        `every_steps`: steps instead."""
        self._pool = pool
        self._every_s = every_s
        self._every_steps = every_steps
        self._next = 0

    def choose_steps(self, run: Run, workers: Collection[WorkerId], leader: WorkerId) -> CheckpointSteps | None:
        """The steps of a plan after which its states are saved; None when it ends first, or has none to save. Steps
        that members have done since their last checkpoint, in plans before this one, count."""
        if self._every_s <= 0 or run.step_s <= 0 or run.spec.whole:
            return None
        every = self._every_steps or max(1, round(self._every_s / run.step_s))
        first = max(1, every - max(request.unsaved_steps for request in run.requests))
        if first >= run.num_steps:
            return None
        keeper = self._choose_keeper(workers, leader)
        return CheckpointSteps(keeper, first, every) if keeper is not None else None

    def _choose_keeper(self, workers: Collection[WorkerId], leader: WorkerId) -> WorkerId | None:
        alive, home = self._pool.list_live(), self._pool.node_of(leader)
        for elsewhere in (True, False):
            for offset in range(len(alive)):
                spec = alive[(self._next + offset) % len(alive)]
                if spec.worker_id not in workers and (spec.node_id != home or not elsewhere):
                    self._next = (self._next + offset + 1) % len(alive)
                    return spec.worker_id
        return None
