"""The directory in which TridentServe keeps what it makes itself, such as the tiny pipelines.

Configurations use this module, so it does not import torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from tridentserve.errors import ConfigError

CACHE_ENV = "TRIDENTSERVE_CACHE"
# A part of the name of a tiny model folder. It must grow when a recipe changes, so that no old model is used as a new
# one.
TINY_VERSION = 1


def cache_dir() -> Path:
    """The directory named by $TRIDENTSERVE_CACHE, otherwise ~/.cache/tridentserve. It need not exist yet.

    Raises `ConfigError` when its `~` stands for no home directory.
    """
    text = os.environ.get(CACHE_ENV) or "~/.cache/tridentserve"
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{text} names no known home directory; set ${CACHE_ENV} to a full path") from None


def tiny_folder(family: str, directory: Path) -> Path:
    """The model folder that a family's tiny pipeline has in a cache directory, whether or not it has been made."""
    return directory / f"tiny-{family}-v{TINY_VERSION}"
