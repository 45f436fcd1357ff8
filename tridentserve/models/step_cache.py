"""The choices of when a denoising step need not be computed whole. Configurations use this module, so it does not
import torch."""

from __future__ import annotations

from pydantic import Field

from tridentserve.options import options
from tridentserve.requests import Quality

# The time of a step relative to one that is computed whole, until requests of the quality have been observed.
# Simulations take it for the truth.
EXPECTED_SHARES: dict[Quality, float] = {"exact": 1.0, "high": 0.75, "fast": 0.5}


@options
class StepCache:
    """The limits of change up to which a step takes over what the last computed step found, per `quality`."""

    high: float = Field(
        default=0.05,
        ge=0,
        description="Limit for requests of `quality: high`: the mean change of what the first block adds, relative to "
        "the last step that was computed whole.",
    )
    fast: float = Field(
        default=0.12,
        ge=0,
        description="Limit for requests of `quality: fast`. A larger limit skips more and changes the result more.",
    )

    def find_limit(self, quality: Quality) -> float:
        """The limit of a quality; 0, which skips nothing, for `exact`."""
        match quality:
            case "exact":
                return 0.0
            case "high":
                return self.high
            case "fast":
                return self.fast
