"""Requests as clients see them: who waits, who may join, how long a result can be asked for again."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from tridentserve.engine.live.updates import CompletedUpdate, Update
from tridentserve.plans import WorkerId
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling.request_records import RequestRecord


@dataclass(slots=True)
class Job:
    """A request and the clients that wait for it. `key` is its id inside the scheduler: a request id that was
    cancelled may be used again, and is another request then. `workers` hold, or may be given, something of it.
    `tiled`: it was decoded in tiles. `asked`: what another request must ask for to be this one."""

    key: str
    spec: RequestSpec
    inputs: GenerationInputs
    waiters: set[asyncio.Queue[Update]] = field(default_factory=set)
    workers: set[WorkerId] = field(default_factory=set)
    last_plan_id: int = -1
    images: list[Any] = field(default_factory=list)
    peak_memory_bytes: int = 0
    tiled: bool = False
    latest: Update | None = None
    asked: GenerationInputs = field(init=False)

    def __post_init__(self) -> None:
        self.asked = _asked(self.inputs)

    def tell(self, update: Update) -> None:
        """Pass an update to all who wait; who joins later begins with the latest."""
        self.latest = update
        for inbox in self.waiters:
            inbox.put_nowait(update)

    def join(self) -> asyncio.Queue[Update]:
        """Wait for this request too. The inbox is given back with `JobBook.leave`."""
        inbox: asyncio.Queue[Update] = asyncio.Queue()
        if self.latest is not None:
            inbox.put_nowait(self.latest)
        self.waiters.add(inbox)
        return inbox

    def is_same(self, spec: RequestSpec, inputs: GenerationInputs) -> bool:
        """Whether a client asks for the same again. Who leaves the seed to the service takes that of this request."""
        same_seed = inputs.seed_drawn or inputs.seed == self.inputs.seed
        return self.spec == spec and same_seed and self.asked == _asked(inputs)

    def completed(self, record: RequestRecord, clock_offset_s: float) -> CompletedUpdate:
        """The last update of the request, which has ended with a result. The scheduler's time plus `clock_offset_s` is
        the Unix clock's."""
        return CompletedUpdate(
            request_id=self.spec.request_id,
            model=self.spec.model,
            outputs=tuple(self.images),
            output_format=self.inputs.output_format,
            seed=self.inputs.seed,
            shape=self.spec.shape,
            created_s=int(record.arrival_s + clock_offset_s),
            queue_s=record.queue_s,
            latency_s=record.latency_s,
            slo_s=record.slo_s,
            slo_met=record.slo_met,
            retries=record.retries,
            stage_durations_s=record.stage_seconds(),
            timeline=tuple(span.shifted(clock_offset_s) for span in record.timeline),
            peak_memory_bytes=self.peak_memory_bytes,
            tiled=self.tiled,
            fps=self.inputs.fps,
        )


class JobBook:
    """All unfinished requests, and finished ones whose result can still be asked for."""

    def __init__(self, max_result_age_s: float) -> None:
        self._max_result_age_s = max_result_age_s
        self._joinable: dict[str, Job] = {}  # by the id clients know
        self._unfinished: dict[str, Job] = {}  # by key
        self._attempts = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def joinable(self, request_id: str) -> Job | None:
        return self._joinable.get(request_id)

    def unfinished(self, key: str) -> Job | None:
        return self._unfinished.get(key)

    def admit(self, spec: RequestSpec, inputs: GenerationInputs) -> Job:
        self._attempts += 1
        job = Job(f"{spec.request_id}~{self._attempts}", spec, inputs)
        self._joinable[spec.request_id] = self._unfinished[job.key] = job
        return job

    def withdraw(self, request_id: str) -> Job | None:
        """The unfinished request with this id, which nobody can join from now on; None when there is none."""
        job = self._joinable.get(request_id)
        if job is None or job.key not in self._unfinished:
            return None
        del self._joinable[request_id]
        return job

    def leave(self, job: Job, inbox: asyncio.Queue[Update]) -> bool:
        """A client has gone. True when it was the last one of an unfinished request, which is of no use to anybody."""
        job.waiters.discard(inbox)
        return not job.waiters and job.key in self._unfinished and self._joinable.get(job.spec.request_id) is job

    def end(self, key: str, keep: bool) -> Job | None:
        """A request has ended. With `keep` its result can be asked for again for a while."""
        job = self._unfinished.pop(key, None)
        if job is None:
            return None
        # Of the picture that it started from, megabytes, a digest is kept in `asked`.
        job.inputs = replace(job.inputs, image=None)
        if keep:
            self._joinable.setdefault(job.spec.request_id, job)
            asyncio.get_running_loop().call_later(self._max_result_age_s, self._drop, job)
        else:
            self._drop(job)
        return job

    def _drop(self, job: Job) -> None:
        if self._joinable.get(job.spec.request_id) is job:
            del self._joinable[job.spec.request_id]


def _asked(inputs: GenerationInputs) -> GenerationInputs:
    """Without the seed, which the service may have drawn, and with a digest of the picture."""
    image = None if inputs.image is None else hashlib.blake2b(inputs.image).digest()
    return replace(inputs, seed=0, image=image)
