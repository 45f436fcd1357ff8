"""The time of denoising steps of each quality, and of those with further input images, relative to the steps that
profiles have, as it is learned."""

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
    """Learned shares by model and quality, with and without further input images. Until some were observed, steps take
    as many times as long as they have times as many tokens."""

    def __init__(self) -> None:
        self._shares: dict[tuple[str, Quality, bool], float] = {}

    def expect(self, spec: RequestSpec) -> RequestSpec:
        """The request with the share that its steps are expected to take: 1 for exact ones without further images."""
        share = spec.token_ratio * self._find(_key(spec))
        rounded = max(1, round(share * _PARTS)) / _PARTS
        return spec if rounded == spec.step_share else replace(spec, step_share=rounded)

    def lower_quality(self, spec: RequestSpec) -> RequestSpec | None:
        """The request in the quality that it may be lowered to; None where it has that already, or none is lower."""
        if spec.cheaper_quality in (None, spec.quality):
            return None
        return self.expect(replace(spec, quality=spec.cheaper_quality))

    def observe(self, spec: RequestSpec, share: float, steps: int) -> None:
        """Learn from `steps` steps that took `share` of the time that the profile has for a request of this size."""
        key = _key(spec)
        known = self._find(key)
        new = min(_MOST_NEW, steps / _STEPS_TO_FORGET)
        self._shares[key] = known + new * (min(share / spec.token_ratio, _MOST_SHARE) - known)

    def _find(self, key: tuple[str, Quality, bool]) -> float:
        _, quality, _ = key
        return self._shares.get(key, EXPECTED_SHARES[quality])


def _key(spec: RequestSpec) -> tuple[str, Quality, bool]:
    """Equal for requests whose steps teach about each other's."""
    return spec.model, spec.quality, spec.token_ratio > 1
