"""The model folders of a service; those of tiny models are made on first use."""

from __future__ import annotations

import logging
from pathlib import Path

from deployments.config.models import ModelArgs
from deployments.models.served import find_family
from tridentserve.engine.live.messages import ModelSource
from tridentserve.models.cache import tiny_folder
from tridentserve.models.kernels import Kernels
from tridentserve.models.step_cache import StepCache

logger = logging.getLogger(__name__)


def find_model_source(model: ModelArgs, cache_dir: Path) -> ModelSource:
    """A model as workers know it. A missing tiny model is made, which takes seconds and imports torch."""
    folder = model.folder or _make_tiny(str(model.tiny), cache_dir)
    step_cache = StepCache(model.step_cache_high, model.step_cache_fast, model.step_cache_max_bytes)
    kernels = Kernels(model.attention, model.compile)
    return ModelSource(model.name, folder, model.formats, kernels, step_cache, starts_from_image(model))


def starts_from_image(model: ModelArgs) -> bool:
    """True where requests of the model may start from an image that its family can do without, so that E has the VAE
    too; False of a model of the hub of which nothing is known before it is fetched. Raises `ModelFolderError`."""
    return bool(model.limits.max_images) and not model.is_unfetched and find_family(model).starts_from_image


def _make_tiny(family: str, cache_dir: Path) -> Path:
    folder = tiny_folder(family, cache_dir)
    if folder.is_dir():
        return folder
    logger.info("making the tiny model of the family %s in %s, once", family, folder)
    from tridentserve.pipelines.tiny.build import ensure_tiny

    return ensure_tiny(family, cache_dir)
