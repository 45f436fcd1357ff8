"""Where TridentServe keeps what it makes itself, such as the tiny pipelines. No torch here: configurations use it."""

from __future__ import annotations

import os
from pathlib import Path

from tridentserve.errors import ConfigError

CACHE_ENV = "TRIDENTSERVE_CACHE"


def cache_dir() -> Path:
    """The folder named by $TRIDENTSERVE_CACHE, else ~/.cache/tridentserve; it need not exist yet.

    Raises `ConfigError` when its `~` stands for no home folder.
    """
    text = os.environ.get(CACHE_ENV) or "~/.cache/tridentserve"
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{text} names no home folder that is known here; set ${CACHE_ENV} to a full path") from None
