"""The models as a replica of `Api` knows them: a mapping that follows those of the Scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from deployments.config.app import ModelArgs
from deployments.model_updates.catalogue import Catalogue
from deployments.models.served import ServedModel, served_models
from tridentserve.errors import CheckpointError

logger = logging.getLogger(__name__)

# So long the Scheduler may keep a question when there is nothing new; its end waits for it.
_WAIT_S = 2.0
# An answer that has not come by then will not come: the Scheduler is being replaced.
_TIMEOUT_S = 30.0
# Before a question that could not be asked is asked again.
_PAUSE_S = 0.5

Ask = Callable[[str | None, float], Awaitable[Catalogue]]


class LiveModels(Mapping[str, ServedModel]):
    """The default model first. Between two looks it may be behind: the Scheduler refuses what it does not serve."""

    def __init__(self, ask: Ask, first: Iterable[ModelArgs]) -> None:
        """`ask(edition, wait_s)` gives the models of the Scheduler, as soon as they are others than in that edition;
        until it has answered they are those of `first` that can be read."""
        self._ask = ask
        self._models: dict[str, ServedModel] = {}
        for model in first:
            with suppress(CheckpointError):  # it may have been removed since, together with its folder
                self._models |= served_models([model])
        self._task: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Begin to look. To be called in a running event loop; a second call has no effect."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow())

    def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def _follow(self) -> None:
        edition: str | None = None
        while True:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    catalogue = await self._ask(edition, _WAIT_S)
            except Exception as error:  # whatever it is: the Scheduler is not there at the moment
                logger.info("the models cannot be asked for: %s", type(error).__name__)
                await asyncio.sleep(_PAUSE_S)
            else:
                self._models = {model.name: model for model in catalogue.models}
                edition = catalogue.edition

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)
