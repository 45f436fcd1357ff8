"""Exact decoding by several workers: each computes a share of the rows of every layer of a VAE's decoder.

Between layers a rank holds contiguous rows of the image, in all frames. A convolution borrows the rows next to its own
from the neighbouring ranks, a group norm adds up its statistics over all ranks, and in the attention of the middle
block each rank attends from its own pixels to the keys and values of all ranks. Layers that work on single pixels, and
upsampling to the nearest neighbour, need no exchange. So the result is that of one worker up to rounding, whereas
independent tiles differ at their seams. The parallel VAE of xDiT (arXiv 2411.01738) works in the same way.

Hooks are installed once, when the model is loaded. They act inside `sequence_parallel(group)` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tridentserve.errors import ConfigError
from tridentserve.parallel.collectives import CollectiveGroup
from tridentserve.parallel.ulysses import get_current_group

# The ways to pad that are known, by the names that convolutions have for them.
_PADDING_MODES = {"zeros": "constant", "replicate": "replicate", "reflect": "reflect"}


class _RowSharding:
    """Shares the rows of the running decoder among the ranks of a group."""

    def __init__(self, group: CollectiveGroup, latent_rows: int) -> None:
        self.group = group
        self.sizes = [len(rows) for rows in torch.arange(latent_rows).tensor_split(group.size)]
        """Rows of latents by rank. Later layers have a multiple of them."""
        self.frames = 1
        """Latent frames of the video that is decoded; attention masks tell frames apart."""

    def shard(self, latents: torch.Tensor) -> torch.Tensor:
        """Select this rank's rows of (..., rows, columns)."""
        return torch.split(latents, self.sizes, dim=-2)[self.group.rank].contiguous()

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Return all rows of (..., rows, columns) on every rank."""
        return torch.cat(self._gather_parts(shard, dim=-2), dim=-2)

    def _gather_parts(self, shard: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Return the shards of all ranks, whose length along `dim` is in proportion to their rows."""
        shapes = []
        for size in self.sizes:
            shape = list(shard.shape)
            shape[dim] = shape[dim] // self.sizes[self.group.rank] * size
            shapes.append(tuple(shape))
        return self.group.all_gather(shard, shapes)

    def with_neighbours(self, shard: torch.Tensor, rows: int, mode: str = "constant", value: float = 0) -> torch.Tensor:
        """Extend the shard (..., rows, columns) by `rows` rows above and below: the neighbours' rows inside the image,
        and rows as `functional.pad` makes them at its edges."""
        rank, last = self.group.rank, self.group.size - 1
        if shard.shape[-2] < rows:
            raise ConfigError(
                f"a convolution over {2 * rows + 1} rows cannot be shared; use a smaller degree for decode"
            )
        top, bottom = shard[..., :rows, :], shard[..., -rows:, :]
        nothing = shard.new_empty(0)
        sent = [nothing] * (last + 1)
        shapes: list[tuple[int, ...]] = [(0,)] * (last + 1)
        neighbours = {rank - 1: top, rank + 1: bottom}
        for neighbour, edge in neighbours.items():
            if 0 <= neighbour <= last:
                sent[neighbour], shapes[neighbour] = edge, edge.shape
        received = self.group.all_to_all(sent, shapes)
        # The rows at an edge of the image are made of those next to it, some of which are a neighbour's.
        from_edge = torch.cat([shard, received[rank + 1]], dim=-2) if rank == 0 else shard
        above = received[rank - 1] if rank > 0 else _pad_edge(from_edge, rows, mode, value)
        from_edge = torch.cat([received[rank - 1], shard], dim=-2) if rank == last else shard
        below = received[rank + 1] if rank < last else _pad_edge(from_edge.flip(-2), rows, mode, value).flip(-2)
        return torch.cat([above, shard, below], dim=-2)

    def pad(self, shard: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
        """Replace `functional.pad`: rows are padded with those of the neighbours."""
        if len(pad) < 4 or not (pad[2] or pad[3]):
            return functional.pad(shard, list(pad), mode, value)
        if pad[2] != pad[3] or mode not in _PADDING_MODES.values():
            raise ConfigError(
                f"padding {tuple(pad)} ({mode}) cannot be shared by several workers; use degree 1 for decode"
            )
        others = [*pad[:2], 0, 0, *pad[4:]]
        return self.with_neighbours(functional.pad(shard, others, mode, value), pad[2], mode, value or 0)

    def group_norm(
        self,
        shard: torch.Tensor,
        num_groups: int,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """Replace `functional.group_norm`: the statistics are those of the rows of all ranks."""
        if shard.ndim == 5:
            self.frames = shard.shape[2]
        batch, channels = shard.shape[:2]
        grouped = shard.reshape(batch, num_groups, -1)
        # The sums are in float64, so that the difference of squares below has all its digits.
        total = grouped.sum(dim=-1, dtype=torch.float64)
        squares = torch.linalg.vector_norm(grouped, dim=-1, dtype=torch.float64).square()
        mine = torch.stack([total, squares])
        total, squares = torch.stack(self.group.all_gather(mine, [tuple(mine.shape)] * self.group.size)).sum(0)
        count = grouped.shape[-1] // self.sizes[self.group.rank] * sum(self.sizes)
        mean: torch.Tensor = total / count
        scale: torch.Tensor = (squares / count - mean.square()).clamp(min=0).add(eps).rsqrt()
        normed = ((grouped - mean.float()[..., None]) * scale.float()[..., None]).reshape(shard.shape)
        per_channel = (1, channels, *[1] * (shard.ndim - 2))
        if weight is not None:
            normed = normed * weight.view(per_channel)
        if bias is not None:
            normed = normed + bias.view(per_channel)
        return normed.to(shard.dtype)

    def compute_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute attention of this rank's pixels, (batch, heads, pixels, channels), to the pixels of all ranks."""
        keys, values = torch.cat(self._gather_parts(torch.stack([key, value]), dim=-2), dim=-2)
        if attn_mask is not None:
            attn_mask = self._expand_mask(attn_mask)
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=attn_mask, **kwargs)

    def _expand_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Expand a mask over this rank's keys, (..., queries, frames * pixels), to the keys of all ranks. The mask
        depends on the frame of a key only, as in causal attention over frames."""
        pixels = mask.shape[-1] // self.frames // self.sizes[self.group.rank]
        by_frame = mask.reshape(*mask.shape[:-1], self.frames, -1)[..., :1]
        return torch.cat([by_frame.expand(*by_frame.shape[:-1], pixels * n).flatten(-2) for n in self.sizes], dim=-1)


def _pad_edge(image: torch.Tensor, rows: int, mode: str, value: float) -> torch.Tensor:
    """Make the rows before the first one of an image, or of its upper part."""
    if mode == "reflect":
        return image[..., 1 : rows + 1, :].flip(-2)
    beyond = image[..., :1, :].expand(*image.shape[:-2], rows, image.shape[-1])
    return beyond if mode == "replicate" else torch.full_like(beyond, value)


_ACTIVE: ContextVar[_RowSharding | None] = ContextVar("rows", default=None)


class _SharedRowCalls(TorchFunctionMode):
    """Sends functions that look beyond a pixel to the sharing of rows. Convolutions have hooks of their own."""

    def __init__(self, rows: _RowSharding) -> None:
        super().__init__()
        self._instead: dict[Any, Callable[..., Any]] = {
            functional.pad: rows.pad,
            functional.group_norm: rows.group_norm,
            functional.scaled_dot_product_attention: rows.compute_attention,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))


def install(decoder: torch.nn.Module) -> None:
    """Hook the decoder of a VAE, whose first argument is latents (..., rows, columns) and whose result is pixels, or
    pixels and a value that stays with the rank (a cache of features).

    Inside `sequence_parallel(group)` all members call it with the same arguments, and all of them get all pixels. Where
    the latents have fewer rows than the group has members, each member computes all rows."""
    for module in decoder.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)) and _read_row_padding(module):
            module.forward = _borrow_rows(module)  # type: ignore[method-assign]
    decoder.forward = _share_rows(decoder.forward)


def _read_row_padding(convolution: torch.nn.Conv2d | torch.nn.Conv3d) -> int:
    return int(convolution.padding[-2])  # All convolutions of these decoders state it in numbers.


def _borrow_rows(convolution: Any) -> Callable[..., Any]:
    """Wrap the forward of a convolution so that in a group it reads its neighbours' rows instead of padding.

    The module is hooked and not the function: CogVideoX cuts a module's input into as many calls of the function as the
    memory of a shard allows, and ranks may differ in that number."""
    stock, padding, mode = convolution.forward, convolution.padding, _PADDING_MODES[convolution.padding_mode]
    rows = _read_row_padding(convolution)
    # With these numbers (of columns, rows, frames) convolutions that pad with others than zeros call `functional.pad`.
    before = list(convolution._reversed_padding_repeated_twice)

    @functools.wraps(stock)
    def forward(shard: torch.Tensor) -> Any:
        active = _ACTIVE.get()
        if active is None:
            return stock(shard)
        if convolution.stride[-2] != 1 or convolution.dilation[-2] != 1 or convolution.kernel_size[-2] != 2 * rows + 1:
            raise ConfigError(f"{convolution} cannot be shared by several workers; use degree 1 for decode")
        convolution.padding = (*padding[:-2], 0, padding[-1])
        convolution._reversed_padding_repeated_twice = [*before[:2], 0, 0, *before[4:]]
        try:
            return stock(active.with_neighbours(shard, rows, mode))
        finally:
            convolution.padding = padding
            convolution._reversed_padding_repeated_twice = before

    return forward


def _share_rows(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def forward(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = get_current_group()
        if group is None or latents.shape[-2] < group.size:
            return stock(latents, *args, **kwargs)
        rows = _RowSharding(group, latents.shape[-2])
        if latents.ndim == 5:
            rows.frames = latents.shape[2]
        token = _ACTIVE.set(rows)
        try:
            with _SharedRowCalls(rows):
                output = stock(rows.shard(latents), *args, **kwargs)
        finally:
            _ACTIVE.reset(token)
        return (rows.gather(output[0]), *output[1:]) if isinstance(output, tuple) else rows.gather(output)

    return forward
