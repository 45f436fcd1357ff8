"""The models that lie in this package with their weights, so that a service draws without any download.

Configurations use this module, so it does not import torch.
"""

from __future__ import annotations

from pathlib import Path

from tridentserve.errors import ConfigError

_DIRECTORY = Path(__file__).parent / "shipped"


def list_shipped_models() -> list[str]:
    """The names of the shipped models, sorted."""
    return sorted(path.parent.name for path in _DIRECTORY.glob("*/model_index.json"))


def find_shipped_model(name: str) -> Path:
    """The model folder of a shipped model. Raises `ConfigError` where there is none of this name."""
    if name not in list_shipped_models():
        raise ConfigError(f"no model {name!r} is shipped with TridentServe; use one of {list_shipped_models()}")
    return _DIRECTORY / name
