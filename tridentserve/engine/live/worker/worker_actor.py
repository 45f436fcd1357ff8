"""The Ray actor of a worker (`StageWorker`). Ray starts it and ends it, and carries what is large; the many small calls
come over channels (`worker_calls`).

The parts of a worker need torch, which this module does not import: Ray wants the class of an actor where the actor is
started, and that import would cost the Scheduler's process nine seconds of CPU and 400 MB before the first worker could
begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle

from tridentserve.engine.live.messages import ModelSource, WorkerConfig, WorkerReady
from tridentserve.plans import Replica, WorkerId

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tridentserve.engine.live.handoff.peer import HandoffKey
    from tridentserve.engine.live.transport.parcel import ParcelLayout
    from tridentserve.engine.live.worker.reporting.output_files import EncodedOutput


class StageWorker:
    """Holds Encode, Diffuse and Decode replicas as its placement says, on one device."""

    def __init__(self, config: WorkerConfig) -> None:
        from tridentserve.engine.live.worker.worker import WorkerParts

        self._parts = WorkerParts(config)

    def __repr__(self) -> str:
        """The name of the actor in Ray's dashboard."""
        config = self._parts.config
        return f"StageWorker({config.spec.worker_id}, {config.label})"

    # The worker itself, as the engine calls it.

    async def start(self) -> WorkerReady:
        """Make the node's host copies, together with its other workers, load the replicas of the placement, and take
        channels (see `WorkerCalls`)."""
        from tridentserve.engine.live.worker.worker_calls import WorkerCalls

        return await self._parts.start(partial(WorkerCalls, self._parts))

    async def connect_peers(self, peers: dict[WorkerId, tuple[ActorHandle[Any], WorkerReady]]) -> None:
        """Add peers; a peer that came back replaces its former self."""
        await self._parts.connect_peers(peers)

    async def watch(self) -> None:
        """Never returns: a caller that waits for it gets an error as soon as this process ends."""
        await asyncio.Event().wait()

    async def set_placement(self, replicas: frozenset[Replica], label: str) -> None:
        """Another placement is in force. Weights move when plans need them."""
        self._parts.config = replace(self._parts.config, replicas=replicas, label=label)
        self._parts.replicas.wanted = replicas

    async def add_model(self, source: ModelSource) -> None:
        """Another model may be asked for; its host copies have been made."""
        self._parts.host_copies.add_model(source)

    async def collect_outputs(self, plan_id: int) -> AsyncIterator[EncodedOutput]:
        """The outputs that did not go with the report of a plan, request by request. Each becomes an object of Ray's:
        who holds its reference has it from this node, without another process between."""
        for output in self._parts.plan_reporter.take_outputs(plan_id):
            yield output

    async def deliver_parcel(self, key: HandoffKey, layout: ParcelLayout, buffer: NDArray[np.uint8]) -> None:
        """Take the bytes of a parcel from a peer."""
        await self._parts.deliver_parcel(key, layout, buffer)
