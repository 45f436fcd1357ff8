"""The time of denoising steps of each quality, relative to steps that are computed whole, as it is learned."""

from __future__ import annotations

from dataclasses import replace

from tridentserve.models.step_cache import EXPECTED_SHARES
from tridentserve.requests import Quality, RequestSpec

# An observation of so many steps counts as much as all before it, and at most half as much as that.
_STEPS_TO_FORGET, _MOST_NEW = 200, 0.5
# Steps may seem to take longer than whole ones: where only such requests run, nothing else corrects the profile.
_MOST_SHARE = 20.0
# Shares are told in so many parts of a whole, so that requests of one quality stay alike while it is learned.
_PARTS = 20


class StepShares:
    """Learned shares by model and quality."""

    def __init__(self) -> None:
        self._shares: dict[tuple[str, Quality], float] = {}

    def expect(self, spec: RequestSpec) -> RequestSpec:
        """The request with the share that its steps are expected to take: 1 for exact ones."""
        share = self._find(spec.model, spec.quality)
        rounded = max(1, round(share * _PARTS)) / _PARTS
        return spec if rounded == spec.step_share else replace(spec, step_share=rounded)

    def lower_quality(self, spec: RequestSpec) -> RequestSpec | None:
        """The request in the quality that it may be lowered to; None where it has that already, or none is lower."""
        if spec.cheaper_quality in (None, spec.quality):
            return None
        return self.expect(replace(spec, quality=spec.cheaper_quality))

    def observe(self, model: str, quality: Quality, share: float, steps: int) -> None:
        """Learn from `steps` steps that took `share` of the time that whole ones are expected to take."""
        known = self._find(model, quality)
        new = min(_MOST_NEW, steps / _STEPS_TO_FORGET)
        self._shares[model, quality] = known + new * (min(share, _MOST_SHARE) - known)

    def _find(self, model: str, quality: Quality) -> float:
        return self._shares.get((model, quality), EXPECTED_SHARES[quality])
