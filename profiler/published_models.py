"""The published configurations of real models: what a full-size model is, without its weights. No torch here.

`data/published/` has one JSON file per model, with the entries of `model_index.json` and of each component's
`config.json` in the repository that `source` names (revisions of 2024 and 2025). Entries that only say where a file
was made are left out, and so are entries that have the default of their class. Components that several models share
are in `components.json`, and the files of models refer to them by name. `tests/profiler/test_published_models.py`
compares the sizes that follow from them with the models' papers and cards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from tridentserve.errors import ProfileError

_DIRECTORY = Path(__file__).parent / "data" / "published"
_SHARED = "components"


@dataclass(frozen=True, slots=True)
class Component:
    """One part of a pipeline: the class that makes it, and its `config.json`."""

    library: str
    """`diffusers` or `transformers`, or the pipeline of diffusers that alone has the class."""
    class_name: str
    config: Mapping[str, Any]
    """Values that differ from the defaults of the class."""
    tokenizer: str = ""
    """The class of a text encoder's tokenizer where it does not follow from the encoder's class."""
    cheap: Mapping[str, Any] = Field(default_factory=dict)
    """Changes that make a text encoder cheap but keep its output's shape, where fewer layers alone do not."""
    source: str = ""
    """The repository of a component that several models share."""

    def with_config(self, **changes: Any) -> Component:
        """The same component with some entries of its configuration changed."""
        return replace(self, config={**self.config, **changes})


@cache
def read_shared_components() -> Mapping[str, Component]:
    """The components that several models share, by name."""
    return TypeAdapter(dict[str, Component]).validate_python(_read(_SHARED))


def _resolve(value: Any) -> Any:
    """The shared component of a name."""
    return read_shared_components()[value] if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A pipeline of `diffusers` as its authors published it. Tokenizers are not included, since they have no shapes."""

    pipeline_class: str
    source: str
    """The repository of the model."""
    components: Mapping[str, Annotated[Component, BeforeValidator(_resolve)]]
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Entries of `model_index.json` that are not components."""


def list_published_models() -> list[str]:
    """The names of all models with a published configuration, in alphabetical order."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.json") if path.stem != _SHARED)


@cache
def read_published_model(name: str) -> PublishedModel:
    """The published configuration of a model. Raises `ProfileError`, which lists the names, for an unknown one."""
    if name not in list_published_models():
        known = ", ".join(list_published_models())
        raise ProfileError(f"no published configuration is known of {name!r}; there are: {known}")
    return TypeAdapter(PublishedModel).validate_python(_read(name))


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))
    return found
