"""Adds LoRAs to the models of a running service, once they have been checked, and removes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from deployments.model_updates.change import KnownModel
from deployments.model_updates.lora_registry import LoraRegistry, find_file
from deployments.models.sources import find_model_source
from deployments.schemas.common.lora import require_lora
from deployments.schemas.common.model_choice import make_unknown_model_error
from tridentserve.engine.live.model_changes import ModelChanges
from tridentserve.errors import ConfigError, InvalidRequestError, LoraExistsError, ModelUnavailableError
from tridentserve.models.lora_files import LoraFile

logger = logging.getLogger(__name__)


class LoraChanges:
    """Lives in the Scheduler's event loop."""

    def __init__(
        self,
        registry: LoraRegistry,
        changes: ModelChanges,
        get_known: Callable[[], Mapping[str, KnownModel]],
        cache_dir: Path,
        publish: Callable[[], None],
    ) -> None:
        """`get_known` gives the models of the service at the moment, and `publish` tells clients what they may ask
        for."""
        self._registry = registry
        self._changes = changes
        self._get_known = get_known
        self._cache_dir = cache_dir
        self._publish = publish

    async def add(self, model: str, name: str, path: str) -> LoraFile:
        """See `Backend.add_lora`. The model may change, or get another LoRA of the name, while the file is read."""
        known = self._require_serving(model, name)
        source = await asyncio.to_thread(find_model_source, known.model, self._cache_dir)
        try:
            file = await asyncio.to_thread(find_file, path)
            digest = await self._changes.check_lora(source, file)
        except ConfigError as error:
            raise InvalidRequestError(f"path: {error}", "path") from None
        if known.is_replaced_by(self._require_serving(model, name).model):
            raise ModelUnavailableError(f"{model} was replaced while the LoRA was read")
        lora = LoraFile(model, name, file, digest)
        self._registry.add(lora)
        self._publish()
        logger.info("%s has the LoRA %s now, from %s", model, name, file)
        return lora

    def remove(self, model: str, name: str) -> None:
        """See `Backend.remove_lora`."""
        self._registry.remove(require_lora(self._registry.apply(self._find(model).served), name))
        self._publish()
        logger.info("%s has the LoRA %s no more", model, name)

    def _find(self, model: str) -> KnownModel:
        known = self._get_known()
        if model not in known:
            raise make_unknown_model_error(known)
        return known[model]

    def _require_serving(self, model: str, new_lora: str) -> KnownModel:
        """A model that may get a LoRA of this name."""
        known = self._find(model)
        if not known.is_open:
            raise ModelUnavailableError(f"{model} takes no requests at the moment")
        if not known.served.family.loras:
            raise InvalidRequestError(f"model: {known.served.family.name} has no LoRAs", "model")
        if self._registry.apply(known.served).find_lora(new_lora) is not None:
            raise LoraExistsError("the model has a LoRA of this name; remove it first, or take another name")
        return known
