"""Requests as clients see them: which clients wait, which may join, how long a result can be asked for again."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from tridentserve.engine.live.updates import CompletedUpdate, PreviewUpdate, ProgressUpdate, QueuedUpdate, Update
from tridentserve.plans import DispatchPlan, PlanMember, WorkerId
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling.events import Degrade
from tridentserve.scheduling.request_records import RequestRecord

# Results are kept in the memory of the Scheduler's process where they are files that came with a report: up to this
# number of bytes in all. The oldest go first.
MAX_KEPT_BYTES = 256 << 20
# Stands between a request id and the number of its attempt; no request id has it.
_BEHIND_ID = "~"


def find_request_id(key: str) -> str:
    """The id that clients know of the request with this key: of a video job that of the job, whose requests have a
    number behind it. No client may choose an id with that sign."""
    return key.partition(_BEHIND_ID)[0]


@dataclass(frozen=True, slots=True)
class Prospect:
    """A prediction for a request, as it was at one time."""

    queue_position: int
    end_s: float
    """The time at which it is predicted to end, on the scheduler's clock."""


@dataclass(slots=True)
class ClientRequest:
    """A request and the clients that wait for it."""

    key: str
    """Its id inside the scheduler: a request id that was cancelled may be used again, for another request."""
    spec: RequestSpec
    inputs: GenerationInputs
    waiters: set[asyncio.Queue[Update]] = field(default_factory=set)
    """One queue of updates for each client that waits."""
    watchers: set[asyncio.Queue[Update]] = field(default_factory=set)
    """Those of them that get the updates of progress too."""
    viewers: set[asyncio.Queue[Update]] = field(default_factory=set)
    """Those of these that get the previews too."""
    num_previews: int = 0
    """Previews that have been published."""
    previewed_step: int = 0
    """The step of the latest of them."""
    workers: set[WorkerId] = field(default_factory=set)
    """Workers that hold, or may be given, something of the request."""
    last_plan_id: int = -1
    """The latest plan that the request was part of."""
    outputs: tuple[Any, ...] = ()
    """Its images or videos, or references to them."""
    peak_memory_bytes: int = 0
    """Largest memory that a worker used while it ran a plan of the request."""
    tiled: bool = False
    """The request was decoded in tiles."""
    skipped_steps: float = 0.0
    """Its denoising steps that took over what others had found."""
    latest: Update | None = None
    prospect: Prospect | None = None
    """The latest prediction for an unfinished request that a client watches."""
    comparable: GenerationInputs = field(init=False)
    """Inputs that another request must have to be the same one."""
    asked: RequestSpec = field(init=False)
    """The request as it was asked for: `spec` may have fewer steps, or a lower quality."""

    def __post_init__(self) -> None:
        self.asked, self.comparable = self.spec, _make_comparable(self.inputs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the outputs that are here, and no references."""
        return sum(len(output) for output in self.outputs if isinstance(output, bytes))

    def add_plan(self, plan: DispatchPlan, member: PlanMember) -> None:
        """The request is the member `member` of a plan that is given to workers now."""
        self.workers.add(plan.leader)  # the others keep nothing
        if member.push_to is not None:
            self.workers.add(member.push_to)
        if plan.saves is not None:
            self.workers.add(plan.saves.keeper)
        self.last_plan_id = plan.plan_id

    def degrade(self, effect: Degrade) -> None:
        """The request is made with less work. Nothing of it has run yet."""
        self.spec = spec = effect.apply(self.spec)
        self.inputs = replace(self.inputs.with_computed_steps(spec.num_inference_steps), quality=spec.quality)

    def publish(self, update: Update) -> None:
        """Pass an update to all clients that wait for it; a client that joins later begins with the latest one."""
        is_first = self.latest is None
        self.latest = update
        is_progress = isinstance(update, ProgressUpdate) or (isinstance(update, QueuedUpdate) and not is_first)
        for inbox in self.watchers if is_progress else self.waiters:
            inbox.put_nowait(update)

    def publish_preview(self, step: int, images: tuple[bytes, ...]) -> None:
        """Pass a preview to the clients that want previews, unless they have seen a later step."""
        if step <= self.previewed_step:
            return
        spec, number, output_format = self.spec, self.num_previews, self.inputs.preview_format
        update = PreviewUpdate(spec.request_id, number, step, spec.num_inference_steps, images, output_format)
        self.num_previews, self.previewed_step = self.num_previews + 1, step
        for inbox in self.viewers:
            inbox.put_nowait(update)

    def join(self, with_progress: bool = True, with_previews: bool = False) -> asyncio.Queue[Update]:
        """Add a client that waits for this request, `with_progress` or for its end only. It gives its inbox back with
        `ClientRequests.leave`. It gets previews where the request was made with them, if it wants progress too."""
        inbox: asyncio.Queue[Update] = asyncio.Queue()
        if self.latest is not None and (with_progress or not isinstance(self.latest, ProgressUpdate)):
            inbox.put_nowait(self.latest)
        self.waiters.add(inbox)
        if with_progress:
            self.watchers.add(inbox)
            if with_previews:
                self.viewers.add(inbox)
        return inbox

    def is_same(self, spec: RequestSpec, inputs: GenerationInputs) -> bool:
        """True when a client asks for the same again. A client that leaves the seed to the service takes that of this
        request."""
        same_seed = inputs.seed_drawn or inputs.seed == self.inputs.seed
        return self.asked == spec and same_seed and self.comparable == _make_comparable(inputs)

    def make_result(self, record: RequestRecord, clock_offset_s: float) -> CompletedUpdate:
        """The last update of the request, which has ended with a result. The scheduler's time plus `clock_offset_s` is
        the Unix clock's."""
        return CompletedUpdate(
            request_id=self.spec.request_id,
            model=self.spec.model,
            outputs=self.outputs,
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
            timeline=tuple(span.shift(clock_offset_s) for span in record.timeline),
            peak_memory_bytes=self.peak_memory_bytes,
            tiled=self.tiled,
            predicted_s=record.predicted_s,
            fps=self.inputs.fps,
            reduced_steps=steps if (steps := self.spec.num_inference_steps) != self.asked.num_inference_steps else None,
            quality=self.spec.quality,
            skipped_steps=self.skipped_steps,
        )


class ClientRequests:
    """All unfinished requests, and finished ones whose result can still be asked for."""

    def __init__(self, max_result_age_s: float) -> None:
        self._max_result_age_s = max_result_age_s
        self._joinable: dict[str, ClientRequest] = {}  # by the id clients know
        self._unfinished: dict[str, ClientRequest] = {}  # by key
        self._kept: OrderedDict[str, ClientRequest] = OrderedDict()  # ended with a result, by key, oldest first
        self._kept_bytes = 0
        self._attempts = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def list_watched(self) -> list[ClientRequest]:
        """The unfinished requests whose progress some client wants to hear of."""
        return [request for request in self._unfinished.values() if request.watchers]

    def find_joinable(self, request_id: str) -> ClientRequest | None:
        return self._joinable.get(request_id)

    def find_unfinished(self, key: str) -> ClientRequest | None:
        return self._unfinished.get(key)

    def admit(self, spec: RequestSpec, inputs: GenerationInputs) -> ClientRequest:
        """Accept a request."""
        self._attempts += 1
        request = ClientRequest(f"{spec.request_id}{_BEHIND_ID}{self._attempts}", spec, inputs)
        self._joinable[spec.request_id] = self._unfinished[request.key] = request
        return request

    def withdraw(self, request_id: str) -> ClientRequest | None:
        """Take back the unfinished request with this id: no client can join it from now on. None when there is none."""
        request = self._joinable.get(request_id)
        if request is None or request.key not in self._unfinished:
            return None
        del self._joinable[request_id]
        return request

    def leave(self, request: ClientRequest, inbox: asyncio.Queue[Update]) -> bool:
        """A client has gone. True when it was the last one of an unfinished request, which no client waits for then."""
        request.waiters.discard(inbox)
        request.watchers.discard(inbox)
        request.viewers.discard(inbox)
        return (
            not request.waiters
            and request.key in self._unfinished
            and self._joinable.get(request.spec.request_id) is request
        )

    def end(self, key: str, keep: bool) -> ClientRequest | None:
        """A request has ended. With `keep` its result can be asked for again for a while, which is shorter where there
        are many large ones."""
        request = self._unfinished.pop(key, None)
        if request is None:
            return None
        # Input images may have megabytes; `comparable` keeps digests of them.
        request.inputs = request.inputs.without_images()
        if keep:
            self._joinable.setdefault(request.spec.request_id, request)
            self._kept[key] = request
            self._kept_bytes += request.num_bytes
            asyncio.get_running_loop().call_later(self._max_result_age_s, self._close, request)
            while self._kept_bytes > MAX_KEPT_BYTES:
                self._close(next(iter(self._kept.values())))
        else:
            self._close(request)
        return request

    def _close(self, request: ClientRequest) -> None:
        if self._kept.pop(request.key, None) is not None:
            self._kept_bytes -= request.num_bytes
        if self._joinable.get(request.spec.request_id) is request:
            del self._joinable[request.spec.request_id]


def _make_comparable(inputs: GenerationInputs) -> GenerationInputs:
    """The inputs without the seed, which the service may have drawn, and with digests of the input images and the
    mask."""
    digests = [hashlib.blake2b(image).digest() for image in inputs.images]
    mask = None if inputs.mask is None else hashlib.blake2b(inputs.mask).digest()
    return replace(inputs, seed=0, image=next(iter(digests), None), more_images=tuple(digests[1:]), mask=mask)
