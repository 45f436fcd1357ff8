"""The models that take requests, which the Scheduler publishes to the replicas of `Api` whenever they change."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from deployments.models.served import ServedModel


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The models that take requests at one time."""

    version: str
    """An id that differs after each change and in each process."""
    models: tuple[ServedModel, ...] = ()
    """The models in the order of the configuration; the first is the default."""


class CataloguePublisher:
    """Holds the latest catalogue, and wakes the callers that wait for the next. It lives in one event loop."""

    def __init__(self) -> None:
        self._origin = uuid.uuid4().hex
        self._number = 0
        self._changed = asyncio.Event()
        self.latest = self._make_catalogue(())

    def publish(self, models: Sequence[ServedModel]) -> None:
        """Publish these models, the default first. Nothing happens when they have not changed."""
        if tuple(models) != self.latest.models:
            self.latest = self._make_catalogue(models)
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait_for_change(self, known_version: str | None, timeout_s: float) -> Catalogue:
        """Long-poll: return when the catalogue differs from `known_version`, or after `timeout_s` seconds."""
        if self.latest.version == known_version:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        return self.latest

    def _make_catalogue(self, models: Sequence[ServedModel]) -> Catalogue:
        self._number += 1
        return Catalogue(f"{self._origin}.{self._number}", tuple(models))
