"""The parts of a model that are trained together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch


@dataclass(frozen=True)
class TrainedParts:
    """Parts with weights, and what they need beside these, such as tokenizers, in fields of the subclass."""

    NAMES: ClassVar[tuple[str, ...]]
    """The fields whose modules are trained, by their names in the pipeline."""

    def trained(self) -> dict[str, torch.nn.Module]:
        """The parts with weights, by their names in the pipeline."""
        return {name: getattr(self, name) for name in self.NAMES}

    def move(self, device: torch.device) -> Self:
        """Move the parts with weights to a device. Returns these parts."""
        for part in self.trained().values():
            part.to(device)
        return self

    def replaced(self, parts: Mapping[str, torch.nn.Module]) -> Self:
        """The same with other weights, such as averaged ones."""
        return replace(self, **parts)
