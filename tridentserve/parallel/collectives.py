"""Exchanges of tensors among the members of a group, and among some of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

Shapes = Sequence[tuple[int, ...]]
"""The shape of what comes from each rank."""


class CollectiveGroup(ABC):
    """Members that call the same collectives in the same order."""

    rank: int
    """The number of this member, from 0."""
    size: int
    """The number of members."""

    @abstractmethod
    def start_all_to_all_into(
        self, received: torch.Tensor, received_sizes: Sequence[int], sent: torch.Tensor, sent_sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Begin to send each rank its part of `sent`, and to fill `received` with the parts that the ranks send here.
        Both are contiguous runs of one part for each rank, of so many numbers each; parts may be empty. Returns the
        function that waits for it, which must be called before the next collective. Neither tensor may be changed
        before."""

    def start_all_to_all(self, blocks: Sequence[torch.Tensor], shapes: Shapes) -> Callable[[], list[torch.Tensor]]:
        """Begin an `all_to_all`, and return the function that waits for what it returns. It must be called before the
        next collective, and no block may be changed before."""
        sizes = [math.prod(shape) for shape in shapes]
        received = blocks[0].new_empty(sum(sizes))
        wait = self.start_all_to_all_into(received, sizes, _join_blocks(blocks), [block.numel() for block in blocks])

        def finish() -> list[torch.Tensor]:
            wait()
            return [part.view(shape) for part, shape in zip(torch.split(received, sizes), shapes, strict=True)]

        return finish

    def all_to_all(self, blocks: Sequence[torch.Tensor], shapes: Shapes) -> list[torch.Tensor]:
        """Send `blocks[r]` to each rank r, and return the blocks that the ranks sent here; that of rank r has
        `shapes[r]`. Blocks may differ in size and may be empty; all have one dtype."""
        return self.start_all_to_all(blocks, shapes)()

    def start_exchange(
        self, block: torch.Tensor, receiver: int, sender: int, shape: tuple[int, ...]
    ) -> Callable[[], torch.Tensor]:
        """Begin to send a block to the rank `receiver` and to get one of this shape from `sender`, and return the
        function that waits for that one. All members exchange at once, in one `all_to_all`."""
        ranks, nothing = range(self.size), block.new_empty(0)
        finish = self.start_all_to_all(
            [block if rank == receiver else nothing for rank in ranks],
            [shape if rank == sender else (0,) for rank in ranks],
        )
        return lambda: finish()[sender]

    def all_gather(self, shard: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
        """Return the shards of all ranks, which may differ in size: that of rank r has `shapes[r]`."""
        # Gloo's own all-gather wants equal sizes and is slower than this (2.6 against 1.8 ms for 16 KB in 3 processes).
        return self.all_to_all([shard] * self.size, shapes)


class GroupPart(CollectiveGroup):
    """Some members of a group. Their collectives are such of the whole group in which the others get nothing from them,
    so that all parts of a group must call as many."""

    def __init__(self, whole: CollectiveGroup, members: range) -> None:
        """`members`: ranks of the whole group, this one's among them."""
        self._whole, self._members = whole, members
        self.rank, self.size = members.index(whole.rank), len(members)

    def start_all_to_all_into(
        self, received: torch.Tensor, received_sizes: Sequence[int], sent: torch.Tensor, sent_sizes: Sequence[int]
    ) -> Callable[[], None]:
        return self._whole.start_all_to_all_into(
            received, self._place_sizes(received_sizes), sent, self._place_sizes(sent_sizes)
        )

    def _place_sizes(self, sizes: Sequence[int]) -> list[int]:
        """The sizes by rank of the whole group."""
        placed = [0] * self._whole.size
        for rank, size in zip(self._members, sizes, strict=True):
            placed[rank] = size
        return placed


def _join_blocks(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """One run of all blocks, each of which is copied once. A contiguous block that is alone is not copied."""
    filled = [block for block in blocks if block.numel()]
    if len(filled) == 1:
        return filled[0].reshape(-1)
    run = blocks[0].new_empty(sum(block.numel() for block in filled))
    for part, block in zip(torch.split(run, [block.numel() for block in filled]), filled, strict=True):
        part.view(block.shape).copy_(block)
    return run
