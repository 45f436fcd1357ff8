"""The name of a model of the Hugging Face hub. Configurations use this module, so it asks nobody anything."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
DEFAULT_REVISION = "main"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model as a configuration names it."""

    model_id: str
    """An owner and a name, with a slash between them."""
    revision: str = DEFAULT_REVISION
    """A branch, a tag or a commit."""

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{self.model_id}@{self.revision}"


def is_hub_id(text: str) -> bool:
    """True if a text may be the id of a model of the hub: an owner and a name."""
    return _HUB_ID.fullmatch(text) is not None
