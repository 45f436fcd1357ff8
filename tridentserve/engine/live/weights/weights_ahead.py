"""Weights that come while another plan computes: those of the next plan, loaded and not attached yet.

Reading a model folder, for a host copy that is not there, and building the modules of a model are left to the plan's
own turn. While libraries do either, they change settings of the whole process, above all torch's default number format,
and what computes meanwhile would use these.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from tridentserve.engine.live.weights.weights_loader import LoadedWeights, WeightsLoader
from tridentserve.plans import Replica

logger = logging.getLogger(__name__)


class WeightsAhead:
    """Belongs to the event loop of a worker. One replica comes at a time."""

    def __init__(self, loader: WeightsLoader) -> None:
        self._loader = loader
        self._loaded: dict[Replica, tuple[LoadedWeights, float]] = {}  # with the seconds that it took
        self._arriving_bytes = 0
        self._loading: asyncio.Task[None] | None = None
        self._is_ending = False

    @property
    def num_bytes(self) -> int:
        """Bytes on the device of what has come and of what is on its way."""
        return self._arriving_bytes + sum(loaded.num_bytes for loaded, _ in self._loaded.values())

    def begin(self, needed: Collection[Replica], count_room: Callable[[], int]) -> None:
        """Begin to bring these replicas, unless some are on their way already. What came for a plan that needs others
        leaves. `count_room` tells for how many bytes of weights that come ahead there is room."""
        if self._loading is None or self._loading.done():
            self._is_ending = False
            self._loading = asyncio.create_task(self._bring(tuple(needed), count_room))

    async def settle(self) -> None:
        """Wait for what is on its way; nothing more is begun."""
        if self._loading is not None:
            self._is_ending = True
            await asyncio.wait({self._loading})
            self._loading = None

    def take(self, replica: Replica) -> tuple[LoadedWeights, float] | None:
        """Weights that have come, and the seconds that it took; None where they have not. They are the caller's."""
        return self._loaded.pop(replica, None)

    async def drop(self, needed: Collection[Replica] = ()) -> None:
        """Let go of what has come, but for the replicas `needed`."""
        for replica in [replica for replica in self._loaded if replica not in needed]:
            await self._loader.close(self._loaded.pop(replica)[0])

    async def _bring(self, needed: Collection[Replica], count_room: Callable[[], int]) -> None:
        try:
            await self.drop(needed)
            for replica in needed:
                if not self._is_ending and replica not in self._loaded:
                    await self._bring_one(replica, count_room)
        except Exception as error:  # the plan that needs them loads them itself, and fails with an error of its own
            logger.warning("weights were not loaded ahead: %r", error)

    async def _bring_one(self, replica: Replica, count_room: Callable[[], int]) -> None:
        start_s = time.perf_counter()
        opened = await self._loader.open_ahead(replica)
        if opened is None or self._loader.is_mapped(opened):
            return
        if self.num_bytes + opened.num_bytes > count_room():
            return  # its host copy is open at least
        self._arriving_bytes = opened.num_bytes
        try:
            self._loaded[replica] = await self._loader.load(replica, opened), time.perf_counter() - start_s
        finally:
            self._arriving_bytes = 0
