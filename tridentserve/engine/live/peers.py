"""A peer's handoff buffer, called through its Ray actor. Errors of the call become `HandoffError`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import torch
from ray.actor import ActorHandle
from ray.exceptions import RayError

from tridentserve.engine.live.handoff_peer import HandoffKey
from tridentserve.engine.live.parcel import Layout
from tridentserve.errors import HandoffError
from tridentserve.plans import WorkerId

T = TypeVar("T")


class RayPeer:
    """See `handoff_peer.Peer`."""

    def __init__(self, handle: ActorHandle[Any], link_name: str | None) -> None:
        self._handle = handle
        self._link_name = link_name

    @property
    def link_name(self) -> str | None:
        return self._link_name

    async def reserve(self, key: HandoffKey, producer: WorkerId, nbytes: int) -> int | None:
        return await _answer(self._handle.reserve.remote(key, producer, nbytes))

    async def commit(self, key: HandoffKey, layout: Layout) -> None:
        await _answer(self._handle.commit.remote(key, layout))

    async def release(self, key: HandoffKey) -> None:
        await _answer(self._handle.release.remote(key))

    async def deliver(self, key: HandoffKey, layout: Layout, buffer: torch.Tensor) -> None:
        # numpy travels beside the pickle without a copy; a torch tensor does not
        await _answer(self._handle.deliver.remote(key, layout, buffer.numpy()))

    async def send(self, key: HandoffKey, to: WorkerId) -> None:
        await _answer(self._handle.send.remote(key, to))


async def _answer(reference: Awaitable[T]) -> T:
    try:
        return await reference
    except RayError as error:
        raise HandoffError(f"a peer did not answer: {error}") from error
