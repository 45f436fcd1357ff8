"""Shares the tokens of one forward pass among the members of a group: the collectives of Ulysses.

Between attentions every rank holds a contiguous share of the image tokens and all text tokens. Inside an attention it
holds all tokens for its share of the heads: one all-to-all there, with queries, keys and values together, and one
back, in which the text output of every head reaches every rank. Text is short, so every rank computes all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from tridentserve.errors import ConfigError
from tridentserve.parallel.groups import SequenceGroup


class TokenSharding:
    """Shares the image tokens of the running forward pass among the ranks of a group."""

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self.sizes: list[int] = []
        """Image tokens by rank, as `shard` shared them out."""

    def shard(self, tokens: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Select this rank's image tokens, (batch, local, channels), of all image tokens, (batch, tokens, channels).

        Raises `ConfigError` when the heads or the tokens cannot be shared by the group."""
        size = self.group.size
        if num_heads % size:
            raise ConfigError(
                f"{num_heads} attention heads cannot be shared by {size} workers; use a degree that divides {num_heads}"
            )
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

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Return all image tokens, (batch, tokens, channels), on every rank."""
        batch, _, channels = shard.shape
        return torch.cat(self.group.all_gather(shard, [(batch, size, channels) for size in self.sizes]), dim=1)

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
        group, sizes = self.group, self.sizes
        local = sizes[group.rank]
        batch, heads, length, channels = query.shape
        share = heads // group.size
        text, image = _split_text(torch.stack([query, key, value]), length - local, text_first)
        received = group.all_to_all(
            image.chunk(group.size, dim=2), [(3, batch, share, size, channels) for size in sizes]
        )
        text = text.chunk(group.size, dim=2)[group.rank]
        joint = _join_text(text, torch.cat(received, dim=3), text_first)
        if kwargs.get("attn_mask") is not None:
            kwargs["attn_mask"] = self._expand_mask(kwargs["attn_mask"], length - local, text_first)

        output = sdpa(*joint.unbind(0), **kwargs)

        text, image = _split_text(output, length - local, text_first)
        blocks = [_join_text(text, shard, text_first) for shard in torch.split(image, sizes, dim=2)]
        return torch.cat(group.all_to_all(blocks, [(batch, share, length, channels)] * group.size), dim=1)

    def _expand_mask(self, mask: torch.Tensor, text: int, text_first: bool) -> torch.Tensor:
        """Expand a mask of keys, (batch, 1, 1, text + local), or of queries and keys, to all image tokens. Only text
        can be masked; `ConfigError` is raised where a mask tells image tokens apart."""
        whole = self._expand_rows(mask.transpose(-1, -2), text, text_first).transpose(-1, -2)
        if mask.shape[-2] == 1:
            return whole
        _, image = _split_text(mask, text, text_first)
        if bool((image != image[..., :1, :]).any()):
            raise ConfigError(
                f"an attention masks image tokens one by one (mask of shape {tuple(mask.shape)}), which cannot be "
                "shared by several workers; use degree 1"
            )
        return self._expand_rows(whole, text, text_first)

    def _expand_rows(self, rows: torch.Tensor, text: int, text_first: bool) -> torch.Tensor:
        """Expand the rows of a mask, (..., text + local, columns), to all image tokens."""
        of_text, image = _split_text(rows, text, text_first)
        everyone = image[..., :1, :].expand(*image.shape[:-2], sum(self.sizes), -1)
        return _join_text(of_text, everyone, text_first)


def _split_text(tokens: torch.Tensor, text: int, text_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Split (..., tokens, channels) into its text tokens and its image tokens."""
    start = 0 if text_first else tokens.shape[-2] - text
    image = tokens.narrow(-2, text, tokens.shape[-2] - text) if text_first else tokens.narrow(-2, 0, start)
    return tokens.narrow(-2, start, text), image


def _join_text(text: torch.Tensor, image: torch.Tensor, text_first: bool) -> torch.Tensor:
    return torch.cat([text, image] if text_first else [image, text], dim=-2)


class SharedAttentionCalls(TorchFunctionMode):
    """Sends calls of SDPA to a sharding. The attention processors of all families end in that function."""

    def __init__(self, sharding: TokenSharding, text_first: bool) -> None:
        super().__init__()
        self.sharding = sharding
        self.text_first = text_first
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.calls += 1
        return self.sharding.compute_attention(func, *args, text_first=self.text_first, **kwargs)
