"""The cache directory for files that TridentServe makes itself, such as tiny pipelines. Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

from tridentserve.errors import ConfigError

CACHE_ENV = "TRIDENTSERVE_CACHE"
# Part of the name of a tiny pipeline's folder: raise it when a recipe changes, so that old ones are not taken for new.
TINY_VERSION = 1


def cache_dir() -> Path:
    """The directory named by $TRIDENTSERVE_CACHE, else ~/.cache/tridentserve; it need not exist yet.

    Raises `ConfigError` when its `~` stands for no home directory.
    """
    text = os.environ.get(CACHE_ENV) or "~/.cache/tridentserve"
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{text} names no home directory that exists; set ${CACHE_ENV} to a full path") from None


def tiny_folder(family: str, folder: Path) -> Path:
    """The model folder of a family's tiny pipeline in a cache directory, whether or not it exists yet."""
    return folder / f"tiny-{family}-v{TINY_VERSION}"
