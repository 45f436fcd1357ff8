"""Where TridentServe keeps what it makes itself, such as the tiny pipelines. No torch here: configurations use it."""

from __future__ import annotations

import os
from pathlib import Path

from tridentserve.errors import ConfigError

CACHE_ENV = "TRIDENTSERVE_CACHE"
# Part of the name of a tiny pipeline's folder: raise it when a recipe changes, so that old ones are not taken for new.
TINY_VERSION = 1


def cache_dir() -> Path:
    """The folder named by $TRIDENTSERVE_CACHE, else ~/.cache/tridentserve; it need not exist yet.

    Raises `ConfigError` when its `~` stands for no home folder.
    """
    text = os.environ.get(CACHE_ENV) or "~/.cache/tridentserve"
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{text} names no home folder that is known here; set ${CACHE_ENV} to a full path") from None


def tiny_folder(family: str, folder: Path) -> Path:
    """Where the tiny pipeline of a family is, once it has been made, in a cache folder."""
    return folder / f"tiny-{family}-v{TINY_VERSION}"
