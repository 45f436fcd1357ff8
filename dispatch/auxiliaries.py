"""E and C given D (TridentServe, arXiv 2510.02838, section 6.2, "Solution for E and C").

A stage that the primary holds runs there: E merges with D (it takes almost no time), C follows on the leader alone (it
gains little from more workers, and the others are free for the next request). Otherwise it goes to the auxiliary that
is idle or expected to be free first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from profiler.memory import held_weights_bytes, stages_peak_bytes
from tridentserve.plans import WorkerId
from tridentserve.protocols import StageTimes, WorkerView
from tridentserve.requests import Shape
from tridentserve.stages import Stage


class Auxiliaries:
    """The auxiliary workers of each model and stage, with the queues they will have after this tick's choices."""

    def __init__(
        self, workers: Iterable[WorkerView], times: StageTimes, handoff_reserve_bytes: int, now_s: float
    ) -> None:
        self._times = times
        self._reserve_bytes = handoff_reserve_bytes
        self._workers = sorted(workers, key=lambda worker: worker.worker_id)
        self._free_at_s = {
            worker.worker_id: now_s if worker.idle else max(now_s, worker.free_at_s) for worker in self._workers
        }
        self._holders: defaultdict[tuple[str, Stage], list[WorkerView]] = defaultdict(list)
        for worker in self._workers:
            primary_of = {replica.model for replica in worker.replicas if replica.stage is Stage.DIFFUSE}
            for replica in worker.replicas:
                if replica.model not in primary_of:
                    self._holders[replica.model, replica.stage].append(worker)
        self._able: dict[tuple[str, Stage, Shape, int], tuple[WorkerView, ...]] = {}

    def able(self, model: str, stage: Stage, shape: Shape, batch: int) -> tuple[WorkerView, ...]:
        """The workers that hold this stage but not D of the model, with the memory to run it at this size."""
        key = (model, stage, shape, batch)
        if key not in self._able:
            need_bytes = self._reserve_bytes + stages_peak_bytes(self._times, model, (stage,), shape, batch=batch)
            self._able[key] = tuple(
                worker
                for worker in self._holders[model, stage]
                if held_weights_bytes(self._times, worker.replicas) + need_bytes <= worker.memory_bytes
            )
        return self._able[key]

    def holders(self, model: str, stage: Stage) -> tuple[WorkerView, ...]:
        """The auxiliaries that hold this stage of a model, whatever their memory."""
        return tuple(self._holders[model, stage])

    def free_at_s(self, candidates: Iterable[WorkerView]) -> float:
        """When the first of these workers is expected to be free."""
        return min(self._free_at_s[worker.worker_id] for worker in candidates)

    def occupy(self, workers: Iterable[WorkerId], until_s: float) -> None:
        """Workers that a plan of this tick takes, which may be auxiliaries of another model."""
        for worker_id in workers:
            self._free_at_s[worker_id] = max(self._free_at_s[worker_id], until_s)

    def take(
        self, candidates: Iterable[WorkerView], ready_s: float, work_s: float, near: str
    ) -> tuple[WorkerId, float]:
        """Queue `work_s` seconds at the worker that is free first (in node `near` when several are), to start no
        earlier than `ready_s`. Returns the worker and when its work is expected to end.

        The queue grows by the work alone: what waits for a long D leaves room for others before it.
        """

        def preference(worker: WorkerView) -> tuple[float, bool, WorkerId]:
            return self._free_at_s[worker.worker_id], worker.node_id != near, worker.worker_id

        chosen = min(candidates, key=preference).worker_id
        start_s = max(ready_s, self._free_at_s[chosen])
        self._free_at_s[chosen] += work_s
        return chosen, start_s + work_s
