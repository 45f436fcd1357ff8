"""Names of models that the configuration gives none."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import count
from pathlib import Path
from typing import Any

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_MOST_CHARS = 80
_FALLBACK = "model"


def name_models(models: Any) -> Any:
    """Entries of `models` as they were written, those that are mappings without a name with one: the last part of the
    hub's id or of the folder, the name of the shipped model, or `tiny-` and the family; with a number where another
    model has it. What is no list stays as it is."""
    if not isinstance(models, list):
        return models
    taken = {name for entry in models if isinstance(name := _find_name(entry), str)}
    named = []
    for entry in models:
        if isinstance(entry, Mapping) and "name" not in entry:
            name = _make_unique(_suggest_name(entry), taken)
            taken.add(name)
            named.append({"name": name, **entry})
        else:
            named.append(entry)
    return named


def _find_name(entry: Any) -> Any:
    return entry.get("name") if isinstance(entry, Mapping) else getattr(entry, "name", None)


def _suggest_name(entry: Mapping[str, Any]) -> str:
    """A valid name for a model, after where it comes from."""
    path, shipped, tiny = entry.get("path"), entry.get("shipped"), entry.get("tiny")
    if isinstance(path, str | Path):
        source = Path(path).absolute().name
    else:
        source = str(shipped) if shipped is not None else f"tiny-{tiny}" if tiny is not None else ""
    return _UNSAFE.sub("-", source)[:_MOST_CHARS].strip("._-") or _FALLBACK


def _make_unique(name: str, taken: Collection[str]) -> str:
    if name not in taken:
        return name
    return next(numbered for number in count(2) if (numbered := f"{name}-{number}") not in taken)
