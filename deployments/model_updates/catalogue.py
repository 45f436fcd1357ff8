"""What the Scheduler tells the replicas of `Api`: the models that take requests, whenever they have changed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from deployments.models.served import ServedModel


@dataclass(frozen=True, slots=True)
class Catalogue:
    """`edition` is another one after each change, and in each process."""

    edition: str
    models: tuple[ServedModel, ...] = ()


class CataloguePublisher:
    """The latest catalogue, and those who wait for the next. Lives in one event loop."""

    def __init__(self) -> None:
        self._origin = uuid.uuid4().hex
        self._number = 0
        self._changed = asyncio.Event()
        self.latest = self._edition(())

    def publish(self, models: Sequence[ServedModel]) -> None:
        """The default model comes first. No effect when nothing has changed."""
        if tuple(models) != self.latest.models:
            self.latest = self._edition(models)
            self._changed.set()
            self._changed = asyncio.Event()

    async def other_than(self, edition: str | None, wait_s: float) -> Catalogue:
        """The latest one, at once unless it is the one of `edition`; after `wait_s` in any case."""
        if self.latest.edition == edition:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
        return self.latest

    def _edition(self, models: Sequence[ServedModel]) -> Catalogue:
        self._number += 1
        return Catalogue(f"{self._origin}.{self._number}", tuple(models))
