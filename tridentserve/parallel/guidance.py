"""Guidance in parallel: of the two passes of a step with classifier-free guidance, each half of a group runs one.

The halves exchange nothing but the result, where members that share tokens exchange them in each attention. So a group
of two shares out the passes alone, and in larger ones each half shares out its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tridentserve.parallel.collectives import CollectiveGroup, GroupPart
from tridentserve.parallel.ulysses import get_current_group


@dataclass(frozen=True, slots=True)
class PassShare:
    """The passes of one step that this member computes."""

    passes: range
    """Their numbers."""
    members: CollectiveGroup | None
    """The members that compute these together; None for a lone one."""
    whole: CollectiveGroup | None = None
    """The group where the passes are shared out; None where every member computes all of them."""

    def gather(self, noise: torch.Tensor) -> torch.Tensor:
        """Return the results of all passes, (passes * rows, ...), on every member, of those of its own ones."""
        if self.whole is None:
            return noise
        partner = (self.whole.rank + self.whole.size // 2) % self.whole.size
        received = self.whole.start_exchange(noise, partner, partner, tuple(noise.shape))()
        return torch.cat([noise, received] if self.passes.start == 0 else [received, noise])


def share_passes(passes: int) -> PassShare:
    """Share out the passes of a step among the halves of the current group, if there are two of each."""
    group = get_current_group()
    if group is None or passes != 2 or group.size % 2:
        return PassShare(range(passes), group)
    width = group.size // 2
    half = group.rank // width
    members = GroupPart(group, range(half * width, (half + 1) * width))
    return PassShare(range(half, half + 1), members, group)
