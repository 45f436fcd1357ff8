"""The models as a replica of `Api` knows them: a mapping that follows those of the Scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from deployments.config.models import ModelArgs
from deployments.model_updates.catalogue import Catalogue
from deployments.models.served import ServedModel, build_served_models
from tridentserve.errors import ModelFolderError

logger = logging.getLogger(__name__)

_POLL_S = 2.0
"""Seconds that the Scheduler keeps a poll when nothing changes. The end of the Scheduler waits for it."""
_TIMEOUT_S = 30.0
"""An answer that has not come by then will not come, because the Scheduler is being replaced."""
_PAUSE_S = 0.5
"""The pause after a poll that failed."""

PollCatalogue = Callable[[str | None, float], Awaitable[Catalogue]]


class CatalogueClient(Mapping[str, ServedModel]):
    """The served models by name, the default first. They may be out of date for a moment; the Scheduler refuses
    requests for models that it does not serve."""

    def __init__(self, poll: PollCatalogue, first: Iterable[ModelArgs]) -> None:
        """`poll(known_version, timeout_s)` long-polls the Scheduler's catalogue. Until its first answer the models are
        those of `first` that can be read."""
        self._poll = poll
        self._models: dict[str, ServedModel] = {}
        for model in first:
            with suppress(ModelFolderError):  # it may have been removed since, together with its model folder
                self._models |= build_served_models([model])
        self._task: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Begin to poll, in a running event loop. A second call has no effect."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow())

    def stop(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()

    async def _follow(self) -> None:
        known_version: str | None = None
        while True:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    catalogue = await self._poll(known_version, _POLL_S)
            except Exception as error:  # whatever it is, the Scheduler is absent at the moment
                logger.debug("the models cannot be asked for: %s", type(error).__name__)
                await asyncio.sleep(_PAUSE_S)
            else:
                self._models = {model.name: model for model in catalogue.models}
                known_version = catalogue.version

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)


class CombinedCatalogue(Mapping[str, ServedModel]):
    """The models that some cell serves. The configuration's first model is in all cells, so that it comes first."""

    def __init__(self, cells: Sequence[CatalogueClient]) -> None:
        self._cells = tuple(cells)

    def follow(self) -> None:
        """See `CatalogueClient`."""
        for cell in self._cells:
            cell.follow()

    def __getitem__(self, name: str) -> ServedModel:
        for cell in self._cells:
            if name in cell:
                return cell[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for cell in self._cells for name in cell))

    def __len__(self) -> int:
        return sum(1 for _ in self)
