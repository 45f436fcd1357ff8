"""A packed sequence over the workers of a group, in which each request has a ring of its own among them.

A worker holds its share of the image tokens of the requests whose rings it is in, and all of their text tokens. Keys
and values of a request's image go around its ring, round by round; those of all rings go in one exchange.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from tridentserve.errors import ConfigError
from tridentserve.packing.rings import plan_rings
from tridentserve.parallel.collectives import CollectiveGroup
from tridentserve.parallel.head_exchange import split_text
from tridentserve.parallel.ring import SoftmaxSum, attend
from tridentserve.pipelines.adapters.packed_sequence import PackedSequence, Stream, pack
from tridentserve.pipelines.context_values import hold_value

_GROUP: ContextVar[CollectiveGroup | None] = ContextVar("packing_group", default=None)


def packed_over(group: CollectiveGroup | None) -> AbstractContextManager[None]:
    """Inside the context packed sequences lie over the members of this group, which all lay out the same requests."""
    return hold_value(_GROUP, group)


def lay_out(images: Sequence[torch.Size], texts: Sequence[torch.Size], text_first: bool) -> PackedSequence:
    """The packed sequence of requests with tokens of these sizes, (rows, tokens, channels), on one worker or over the
    group of `packed_over`."""
    group = _GROUP.get()
    return (
        PackedSequence(images, texts, text_first)
        if group is None
        else BrickedSequence(images, texts, text_first, group)
    )


@dataclass(frozen=True, slots=True)
class _Brick:
    """One request among the workers."""

    index: int
    """Its place among all requests."""
    ring: range
    """Its workers."""
    rows: int
    shares: Sequence[int]
    """Image tokens of each row on each worker of the ring."""


class BrickedSequence(PackedSequence):
    """The places of several requests in the sequences of all workers of a group, which all make it of the same."""

    def __init__(
        self, images: Sequence[torch.Size], texts: Sequence[torch.Size], text_first: bool, group: CollectiveGroup
    ) -> None:
        """As `PackedSequence` has it, with the sizes of whole requests. Raises `ConfigError` where a request has fewer
        tokens than its ring has members."""
        rings = plan_rings([size[0] * size[1] for size in images], group.size)
        for ring, size in zip(rings, images, strict=True):
            if size[1] < len(ring):
                raise ConfigError(f"{size[1]} tokens cannot be shared by {len(ring)} workers")
        self._group = group
        self._bricks = [
            _Brick(index, ring, size[0], [len(part) for part in torch.arange(size[1]).tensor_split(len(ring))])
            for index, (ring, size) in enumerate(zip(rings, images, strict=True))
        ]
        self._mine = [brick for brick in self._bricks if group.rank in brick.ring]
        super().__init__(
            [torch.Size((brick.rows, self._count(brick), 0)) for brick in self._mine],
            [texts[brick.index] for brick in self._mine],
            text_first,
        )
        first_rows = list(itertools.accumulate((size[0] for size in images), initial=0))
        self._row_numbers = torch.cat(
            [torch.arange(first_rows[brick.index], first_rows[brick.index] + brick.rows) for brick in self._mine]
        )

    def _count(self, brick: _Brick) -> int:
        """The image tokens of each row that this worker holds."""
        return brick.shares[brick.ring.index(self._group.rank)]

    def pack_images(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        return pack(
            [
                tokens[brick.index].tensor_split(len(brick.ring), dim=1)[brick.ring.index(self._group.rank)]
                for brick in self._mine
            ]
        )

    def pack_texts(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        return pack([tokens[brick.index] for brick in self._mine])

    def unpack_images(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """The image tokens of all requests, whole, on every worker."""
        channels = tokens.shape[-1]
        held: list[list[_Brick]] = [
            [brick for brick in self._bricks if worker in brick.ring] for worker in range(self._group.size)
        ]
        counts = [
            sum(brick.rows * brick.shares[brick.ring.index(worker)] for brick in bricks)
            for worker, bricks in enumerate(held)
        ]
        gathered = self._group.all_gather(tokens.reshape(-1, channels), [(count, channels) for count in counts])
        parts: list[dict[int, torch.Tensor]] = [{} for _ in self._bricks]
        for worker, (run, bricks) in enumerate(zip(gathered, held, strict=True)):
            sizes = [brick.rows * brick.shares[brick.ring.index(worker)] for brick in bricks]
            for brick, own in zip(bricks, torch.split(run, sizes), strict=True):
                parts[brick.index][worker] = own.view(brick.rows, -1, channels)
        return [torch.cat([parts[brick.index][worker] for worker in brick.ring], dim=1) for brick in self._bricks]

    def _attend(
        self,
        sdpa: Callable[..., torch.Tensor],
        requests: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        keys: Stream,
        kwargs: dict[str, Any],
    ) -> list[torch.Tensor]:
        if keys == "text":  # which each worker has whole
            return super()._attend(sdpa, requests, keys, kwargs)
        if unknown := sorted(name for name in kwargs if kwargs[name] and name != "scale"):
            raise ConfigError(f"an attention of a packed step of several workers has {', '.join(unknown)}")
        sums = [_RingSum(*own, kwargs.get("scale")) for own in requests]
        travelling = {
            brick.index: torch.stack([self._select_image(each, brick, keys) for each in (ring.key, ring.value)])
            for brick, ring in zip(self._mine, sums, strict=True)
        }
        for ring in sums:
            ring.begin()
        for turn in range(1, max(len(brick.ring) for brick in self._bricks)):
            travelling = self._send_on(travelling, turn)
            for brick, ring in zip(self._mine, sums, strict=True):
                if brick.index in travelling:
                    ring.add(travelling[brick.index])
        return [ring.finish() for ring in sums]

    def _select_image(self, tokens: torch.Tensor, brick: _Brick, stream: Stream) -> torch.Tensor:
        """The image tokens of those of a request, (rows, heads, tokens, channels)."""
        if stream == "image":
            return tokens
        return split_text(tokens, tokens.shape[2] - self._count(brick), self._text_first)[1]

    def _send_on(self, travelling: dict[int, torch.Tensor], turn: int) -> dict[int, torch.Tensor]:
        """Send keys and values of each request to the next worker of its ring, if it has so many turns, in one exchange
        of all workers. Returns those that come here, by request."""
        some = next(iter(travelling.values()), None)
        ranks = range(self._group.size)
        sent: list[list[torch.Tensor]] = [[] for _ in ranks]
        coming: list[list[tuple[_Brick, tuple[int, ...]]]] = [[] for _ in ranks]
        for brick in self._mine:
            width = len(brick.ring)
            if width <= turn:
                continue
            place = brick.ring.index(self._group.rank)
            block = travelling[brick.index]
            sent[brick.ring[(place + 1) % width]].append(block)
            shape = (*block.shape[:3], brick.shares[(place - turn) % width], block.shape[-1])
            coming[brick.ring[(place - 1) % width]].append((brick, shape))
        assert some is not None, "a worker of a packed step is in no ring"
        blocks = [torch.cat([block.reshape(-1) for block in run]) if run else some.new_empty(0) for run in sent]
        sizes = [[torch.Size(shape).numel() for _, shape in run] for run in coming]
        received = self._group.all_to_all(blocks, [(sum(each),) for each in sizes])
        return {
            brick.index: part.view(shape)
            for run, block, each in zip(coming, received, sizes, strict=True)
            for (brick, shape), part in zip(run, torch.split(block, each), strict=True)
        }


class _RingSum:
    """The attention of one request's queries on this worker, as keys and values come around."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> None:
        self.key, self.value = key, value
        self._query, self._scale, self._sum = query, scale, SoftmaxSum()

    def begin(self) -> None:
        """Attend to what is here, text among it."""
        self._sum.add(*attend(self._query, self.key, self.value, None, self._scale))

    def add(self, parts: torch.Tensor) -> None:
        """Attend to the keys and values of another worker."""
        self._sum.add(*attend(self._query, parts[0], parts[1], None, self._scale))

    def finish(self) -> torch.Tensor:
        return self._sum.finish(self._query.dtype)
