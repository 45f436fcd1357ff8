"""The requests of other replicas in the Scheduler's process: each replica makes them over a channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from deployments.console.cluster_watch import ClusterWatch
from tridentserve.cells.summary import CellSummary
from tridentserve.engine.live.channels.channel import Channel
from tridentserve.engine.live.updates import CompletedUpdate, FailedUpdate, Update
from tridentserve.errors import InvalidRequestError, TridentServeError, WorkerError
from tridentserve.requests import GenerationInputs, RequestSpec
from tridentserve.scheduling.events import Reject
from tridentserve.scheduling.prediction.predictor import Quote
from tridentserve.scheduling.watching.cluster_state import ClusterState

logger = logging.getLogger(__name__)


class RequestService(Protocol):
    """The service that the calls reach: the live engine, or the replica around it. See `LiveEngine`."""

    def generate_in_batches(
        self, spec: RequestSpec, inputs: GenerationInputs, with_progress: bool = True
    ) -> AsyncGenerator[list[Update], None]: ...

    def has_request(self, request_id: str) -> bool: ...

    def cancel(self, request_id: str) -> bool: ...

    async def quote(self, specs: Sequence[RequestSpec]) -> list[Quote | Reject | None]: ...

    async def summarize_load(self) -> CellSummary: ...

    async def describe_cluster(self) -> ClusterState: ...


class ClientGate:
    """All calls of all replicas, and the outputs that are too large for a channel."""

    def __init__(self, service: RequestService, orphan_s: float) -> None:
        self.service = service
        self.orphan_s = orphan_s
        """Time for which the calls of a replica that is lost go on: a client that asks again with the same id, through
        another replica, joins its request."""
        self.watch = ClusterWatch(service.describe_cluster)
        self.open_calls: set[str] = set()
        self.references: dict[str, tuple[ClientCalls, tuple[Any, ...]]] = {}
        """Ray's references to the outputs of a call that has ended, until its caller, one of those, takes them."""

    def serve(self, channel: Channel) -> ClientCalls:
        """The object that a replica calls over its channel."""
        return ClientCalls(self, channel)

    def take_references(self, call_id: str) -> list[Any]:
        """The references to the outputs of a call, for its caller. Nobody gets them again. Raises `WorkerError`."""
        if call_id not in self.references:
            raise WorkerError("the outputs of this call are not kept any more")
        _, references = self.references.pop(call_id)
        return list(references)

    async def wait_until_idle(self) -> None:
        """Wait for the end of all calls."""
        while self.open_calls:  # noqa: ASYNC110  once in the life of a replica
            await asyncio.sleep(0.1)


class ClientCalls:
    """The calls of one replica. It gets the updates of its calls (`take_updates`), up to the last one."""

    def __init__(self, gate: ClientGate, channel: Channel) -> None:
        self._gate = gate
        self._channel = channel
        self._tasks: dict[str, asyncio.Task[None]] = {}
        channel.closed.add_done_callback(lambda _: self._end_all_later())

    def generate(self, call_id: str, spec: RequestSpec, inputs: GenerationInputs, with_progress: bool) -> None:
        """Make a request, `with_progress` or with its last update alone. No two calls have the same `call_id`."""
        task = asyncio.get_running_loop().create_task(self._run(call_id, spec, inputs, with_progress))
        self._tasks[call_id] = task
        self._gate.open_calls.add(call_id)
        task.add_done_callback(lambda _: self._forget(call_id))

    def end_call(self, call_id: str) -> None:
        """The caller has left. Without effect on a call that has ended."""
        self._gate.references.pop(call_id, None)
        if (task := self._tasks.get(call_id)) is not None:
            task.cancel()

    async def has_request(self, request_id: str) -> bool:
        """True when a request with this id is joined, if it is made again."""
        return self._gate.service.has_request(request_id)

    async def cancel(self, request_id: str) -> bool:
        """Stop a request for all its clients. False when it is unknown or has ended."""
        return self._gate.service.cancel(request_id)

    async def quote(self, specs: Sequence[RequestSpec]) -> list[Quote | Reject | None]:
        """The prediction for each of these requests, if it alone came now."""
        return await self._gate.service.quote(specs)

    async def summarize_load(self) -> CellSummary:
        """The load, with all requests that this replica has made before."""
        return await self._gate.service.summarize_load()

    async def describe_cluster(self, after: int) -> ClusterState:
        """The state of the cluster, with the stages that have ended after this number."""
        return await self._gate.watch.describe(after)

    def _end_all_later(self) -> None:
        """The replica is gone."""
        not_taken = [call_id for call_id, (caller, _) in self._gate.references.items() if caller is self]
        for call_id in (*self._tasks, *not_taken):
            asyncio.get_running_loop().call_later(self._gate.orphan_s, self.end_call, call_id)

    def _forget(self, call_id: str) -> None:
        del self._tasks[call_id]
        self._gate.open_calls.discard(call_id)

    async def _run(self, call_id: str, spec: RequestSpec, inputs: GenerationInputs, with_progress: bool) -> None:
        try:
            async with aclosing(self._gate.service.generate_in_batches(spec, inputs, with_progress)) as batches:
                async for batch in batches:
                    if with_progress:
                        self._send(call_id, batch)
                    elif isinstance(batch[-1], CompletedUpdate | FailedUpdate):
                        self._send(call_id, batch[-1:])
        except TridentServeError as error:
            param = error.param if isinstance(error, InvalidRequestError) else None
            self._send(call_id, [FailedUpdate(spec.request_id, error.code, str(error), param)])
        except Exception:  # a defect: the caller must not wait for ever
            logger.exception("request %s failed", spec.request_id)
            message = "the service failed at this request; its log says why"
            self._send(call_id, [FailedUpdate(spec.request_id, TridentServeError.code, message)])

    def _send(self, call_id: str, updates: Sequence[Update]) -> None:
        *_, last = updates
        if isinstance(last, CompletedUpdate) and not all(isinstance(output, bytes) for output in last.outputs):
            # Ray must see who holds a reference: it travels in a call of Ray's.
            self._gate.references[call_id] = (self, last.outputs)
            updates = [*updates[:-1], replace(last, outputs=())]
        self._channel.tell("take_updates", call_id, updates)
