"""Shares the tokens of one forward pass among the members of a group: the collectives of Ulysses, and a ring.

Between attentions every rank holds a contiguous share of the image tokens and all text tokens. Inside an attention it
holds all tokens for its share of the heads: one all-to-all there, with queries, keys and values together, and one
back, in which the text output of every head reaches every rank. Text is short, so every rank computes all of it.

Where the number of members does not divide the heads, as many neighbours as can share them do so. Each such set holds
its own tokens, and the keys and values of the others come to it around a ring (`tridentserve.parallel.ring`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal

import torch

from tridentserve.errors import ConfigError
from tridentserve.parallel.collectives import CollectiveGroup, GroupPart
from tridentserve.parallel.head_exchange import HeadExchange, join_text, split_text
from tridentserve.parallel.ring import SoftmaxSum, attend, pass_around

AttentionKind = Literal["text first", "text last", "read image"]
"""Attention of all tokens to all, in which text stands before the image tokens or behind them, or attention from tokens
that every rank has to the image tokens."""

# The arguments of scaled_dot_product_attention that a ring knows.
_RING_KEYWORDS = frozenset({"attn_mask", "scale"})


class TokenSharding:
    """Shares the image tokens of the running forward pass among the ranks of a group."""

    def __init__(self, group: CollectiveGroup) -> None:
        self.group = group
        self.sizes: list[int] = []
        """Image tokens by rank, as `shard` shared them out."""
        self._sharable: torch.Tensor | None = None  # the mask that was looked at last

    def shard(self, tokens: torch.Tensor) -> torch.Tensor:
        """Select this rank's image tokens, (batch, local, channels), of all image tokens, (batch, tokens, channels).

        Raises `ConfigError` when the group has more members than there are tokens."""
        size = self.group.size
        if tokens.shape[1] < size:
            # Attention processors of diffusers fail on the ranks that have none.
            raise ConfigError(f"{tokens.shape[1]} tokens cannot be shared by {size} workers; use degree 1")
        shards = tokens.tensor_split(size, dim=1)
        self.sizes = [shard.shape[1] for shard in shards]
        return shards[self.group.rank].contiguous()

    def shard_positions(self, table: torch.Tensor) -> torch.Tensor:
        """Select the rows of a positional table, (text + tokens, channels), for the tokens that this rank holds."""
        text, *shards = torch.split(table, [table.shape[0] - sum(self.sizes), *self.sizes])
        return torch.cat([text, shards[self.group.rank]])

    def share(self, table: torch.Tensor, dim: int) -> torch.Tensor:
        """Select this rank's rows of a table with one row per image token along `dim`."""
        return table.tensor_split(self.group.size, dim=dim)[self.group.rank]

    def select_image(self, tokens: torch.Tensor, text_first: bool) -> torch.Tensor:
        """Select this rank's image tokens of those and text, (batch, local + text, channels)."""
        text = tokens.shape[1] - self.sizes[self.group.rank]
        return split_text(tokens, text, text_first)[1].contiguous()

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Return all image tokens, (batch, tokens, channels), on every rank."""
        batch, _, channels = shard.shape
        return torch.cat(self.group.all_gather(shard, [(batch, size, channels) for size in self.sizes]), dim=1)

    def choose_attention(self, kind: AttentionKind) -> Callable[..., torch.Tensor]:
        """The function that computes it, called with SDPA and the arguments of SDPA."""
        if kind == "read image":
            return self.read_image
        return functools.partial(self.compute_attention, text_first=kind == "text first")

    def compute_attention(
        self,
        sdpa: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        text_first: bool,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute attention over all tokens. `query`, `key`, `value` and the result: (batch, heads, local + text,
        channels).

        The text, if any, stands before or behind the image tokens.
        """
        members = self._find_peers(query.shape[1])
        peers = GroupPart(self.group, members) if len(members) < self.group.size else self.group
        sizes = [self.sizes[rank] for rank in members]
        text = query.shape[2] - sizes[peers.rank]
        exchange = HeadExchange(peers, sizes, text, text_first)
        whole = exchange.collect_tokens([query, key, value])
        if peers is self.group:
            output = self._attend_at_once(sdpa, whole, text, text_first, kwargs)
        else:
            output = self._attend_in_ring(peers.size, whole, text, text_first, kwargs)
        return exchange.collect_heads(output)

    def read_image(
        self,
        sdpa: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute attention from tokens that every rank has to all image tokens. `key` and `value`: (batch, heads,
        local, channels); `query` and the result: (batch, heads, tokens, channels).

        Each rank attends to its own image tokens, and then all sum up what they have found, in one order."""
        _check_keywords(kwargs, self.group.size)
        if kwargs.get("attn_mask") is not None:
            raise ConfigError(
                "an attention masks image tokens, which cannot be shared by several workers; use degree 1"
            )
        output, log_sum = attend(query, key, value, None, kwargs.get("scale"))
        mine, result = torch.cat([output.float(), log_sum[..., None].float()], dim=-1), SoftmaxSum()
        for part in self.group.all_gather(mine, [tuple(mine.shape)] * self.group.size):
            result.add(part[..., :-1], part[..., -1])
        return result.finish(query.dtype)

    def _find_peers(self, heads: int) -> range:
        """The ranks that share out the heads with this one, as many as can; each such set is a part of the ring."""
        width = math.gcd(heads, self.group.size)
        first = self.group.rank - self.group.rank % width
        return range(first, first + width)

    def _attend_at_once(
        self,
        sdpa: Callable[..., torch.Tensor],
        whole: torch.Tensor,
        text: int,
        text_first: bool,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Attention of all tokens to all tokens, for this rank's heads. `whole`: queries, keys and values, (3, batch,
        heads, tokens + text, channels), with so many text tokens."""
        if kwargs.get("attn_mask") is not None:
            tokens = sum(self.sizes)
            mask = kwargs["attn_mask"]
            self._check_mask(mask, text, text_first)
            kwargs = {**kwargs, "attn_mask": _expand_mask(mask, text, text_first, tokens, tokens)}
        return sdpa(*whole.unbind(0), **kwargs)

    def _attend_in_ring(
        self, width: int, whole: torch.Tensor, text: int, text_first: bool, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Attention of the tokens of `width` neighbours to all tokens, for this rank's heads, as `_attend_at_once` has
        it."""
        _check_keywords(kwargs, self.group.size)
        members = GroupPart(self.group, range(self.group.rank % width, self.group.size, width))
        sizes = [sum(self.sizes[start : start + width]) for start in range(0, self.group.size, width)]
        if kwargs.get("attn_mask") is not None:
            self._check_mask(kwargs["attn_mask"], text, text_first)
        _, image = split_text(whole, text, text_first)
        result = SoftmaxSum()

        def add(owner: int, parts: torch.Tensor) -> None:
            """Every rank has the text, and sees its own."""
            mask = kwargs.get("attn_mask")
            if mask is not None:
                mask = _expand_mask(mask, text, text_first, sizes[members.rank], sizes[owner])
                mask = mask if owner == members.rank else split_text(mask.transpose(-1, -2), text, text_first)[1].mT
            keys, values = whole[1:] if owner == members.rank else parts
            result.add(*attend(whole[0], keys, values, mask, kwargs.get("scale")))

        shapes = [(*image.shape[1:-2], size, image.shape[-1]) for size in sizes]
        pass_around(members, image[1:], [(2, *shape) for shape in shapes], add)
        return result.finish(whole.dtype)

    def _check_mask(self, mask: torch.Tensor, text: int, text_first: bool) -> None:
        """Raise `ConfigError` where a mask of queries and keys tells image tokens apart. All layers of a model have the
        same mask: it is looked at once, since the answer has to be waited for."""
        if mask.shape[-2] == 1 or (self._sharable is not None and _is_same(mask, self._sharable)):
            return
        _, image = split_text(mask, text, text_first)
        if bool((image != image[..., :1, :]).any()):
            raise ConfigError(
                f"an attention masks image tokens one by one (mask of shape {tuple(mask.shape)}), which cannot be "
                "shared by several workers; use degree 1"
            )
        self._sharable = mask


def _is_same(mask: torch.Tensor, other: torch.Tensor) -> bool:
    """True for two views of the same numbers."""
    return mask.data_ptr() == other.data_ptr() and mask.shape == other.shape and mask.stride() == other.stride()


def _check_keywords(kwargs: dict[str, Any], size: int) -> None:
    if unknown := sorted(name for name in kwargs.keys() - _RING_KEYWORDS if kwargs[name]):
        raise ConfigError(
            f"an attention has {', '.join(unknown)}, and its heads cannot be shared by {size} workers; "
            "use a degree that divides their number"
        )


def _expand_mask(mask: torch.Tensor, text: int, text_first: bool, queries: int, keys: int) -> torch.Tensor:
    """Expand a mask of keys, (batch, 1, 1, text + local), or of queries and keys, to so many image tokens. Only text
    can be masked (`TokenSharding._check_mask`)."""
    whole = _expand_rows(mask.transpose(-1, -2), text, text_first, keys).transpose(-1, -2)
    if mask.shape[-2] == 1:
        return whole
    return _expand_rows(whole, text, text_first, queries)


def _expand_rows(rows: torch.Tensor, text: int, text_first: bool, count: int) -> torch.Tensor:
    """Expand the rows of a mask, (..., text + local, columns), to `count` image tokens."""
    of_text, image = split_text(rows, text, text_first)
    everyone = image[..., :1, :].expand(*image.shape[:-2], count, -1)
    return join_text(of_text, everyone, text_first)


CURRENT_SHARDING: ContextVar[TokenSharding | None] = ContextVar("sequence_parallel", default=None)
"""The sharding of the current `tridentserve.parallel.sequence_parallel`; None at degree 1."""
