"""Guidance in parallel: of the two passes of a step with classifier-free guidance, each half of a group runs one.

The halves exchange nothing but the result, where members that share tokens exchange them in each attention. So a group
of two shares out the passes alone, and in larger ones each half shares out its tokens. Where a family has more passes,
which differ in their attentions, they are shared out among members that each run some of them alone.
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
        width = self.members.size if self.members is not None else 1
        peers = GroupPart(self.whole, range(self.whole.rank % width, self.whole.size, width))
        return torch.cat(peers.all_gather(noise, [tuple(noise.shape)] * peers.size))


def share_passes(passes: int) -> PassShare:
    """Share out the passes of a step among parts of the current group: two among its halves, if there are two, and more
    than two among its members, if all get as many."""
    group = get_current_group()
    parts = 1 if group is None else (2 - group.size % 2 if passes == 2 else group.size)
    if group is None or parts == 1 or passes < 2 or passes % parts:
        return PassShare(range(passes), group)
    width, each = group.size // parts, passes // parts
    part = group.rank // width
    members = GroupPart(group, range(part * width, (part + 1) * width))
    return PassShare(range(part * each, (part + 1) * each), members, group)
