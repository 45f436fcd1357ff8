"""Modules of which a directory has many alike, so that rules about single modules pass over them."""

from __future__ import annotations

from pathlib import Path

from tridentserve.models.families import FAMILIES


def is_one_of_many(path: Path) -> bool:
    """True when a module is one model family of many, or one policy of many. The modules that these share are not."""
    if path.parent.name in ("adapters", "tiny") and path.stem in FAMILIES:
        return True
    return "\n@register_policy(" in path.read_text(encoding="utf-8")
