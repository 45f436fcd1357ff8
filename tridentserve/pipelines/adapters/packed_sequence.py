"""Denoising steps of requests that differ in size, text length and timestep, as one sequence without padding.

The blocks of a transformer compute each token by itself but for their attentions. So the image tokens of all requests
stand behind one another, and so do their text tokens, in the dimension of the batch: (tokens, 1, channels). A block
then modulates each token by a row of its own, with its own code. Hooks give the tokens of a request the modulation of
its row, and compute the attention of each request alone, in the shapes in which it would run alone.

Hooks are installed once, when the first such step comes. They act inside `PackedSequence.active` only.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tridentserve.errors import ConfigError
from tridentserve.parallel.attention_calls import RedirectedAttention
from tridentserve.parallel.head_exchange import join_text, split_text
from tridentserve.pipelines.base import Tensors
from tridentserve.pipelines.context_values import hold_value

# The tokens that a module gets: of the images, of the texts, or of both, one after the other.
Stream = Literal["image", "text", "joint"]

_ACTIVE: ContextVar[PackedSequence | None] = ContextVar("packed_sequence", default=None)


@dataclass(frozen=True, slots=True)
class NoiseCall:
    """The arguments with which one request alone would have its noise predicted. All tensors but those in `shared` have
    a row for each pass of guidance and output."""

    latents: torch.Tensor
    timesteps: torch.Tensor
    rows: Tensors
    """The other inputs of the transformer."""
    shared: Tensors
    """The tensors of the request, for those that all rows have in common (positions)."""


class PackingAdapter(ABC):
    """The part that an adapter has in addition where its requests of different sizes share steps
    (`Family.packs_sizes`)."""

    @abstractmethod
    def _predict_noises(self, calls: Sequence[NoiseCall]) -> list[torch.Tensor]:
        """Do what `_predict_noise` does for requests of different sizes at once, as one packed sequence."""

    @abstractmethod
    def _install_packing(self) -> None:
        """Hook the transformer for packed sequences, once. Without one the hooks change nothing."""


class PackedSequence:
    """The places of several requests in one sequence."""

    def __init__(self, images: Sequence[torch.Size], texts: Sequence[torch.Size], text_first: bool) -> None:
        """`images` and `texts`: the sizes of each request's tokens, (rows, tokens, channels). `text_first`: text stands
        before the image where a module has both."""
        self._rows = [size[0] for size in images]
        self._image_tokens = [size[1] for size in images]
        self._text_tokens = [size[1] for size in texts]
        self._text_first = text_first
        self._row_numbers = torch.arange(sum(self._rows))  # among those of all requests
        self._owners: dict[Stream, torch.Tensor] = {}

    def active(self) -> AbstractContextManager[None]:
        """Have hooked modules treat their tokens as those of this sequence."""
        return hold_value(_ACTIVE, self)

    def spread(self, rows: torch.Tensor, stream: Stream) -> torch.Tensor:
        """Give each token of a stream the values of its row: from (rows, ...) to (tokens, ...)."""
        if stream not in self._owners:
            self._owners[stream] = self._find_owners(stream).to(rows.device)
        return rows.index_select(0, self._owners[stream])

    def pack_images(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pack the image tokens of each request, (rows, tokens, channels), into one sequence, (all tokens, 1,
        channels)."""
        return pack(tokens)

    def pack_texts(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same for the text tokens of each request."""
        return pack(tokens)

    def unpack_images(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Split image tokens, (tokens, 1, channels), into those of each request, (rows, tokens, channels)."""
        split = torch.split(tokens, [rows * count for rows, count in zip(self._rows, self._image_tokens, strict=True)])
        return [part.view(rows, -1, part.shape[-1]) for rows, part in zip(self._rows, split, strict=True)]

    def compute_attention(
        self,
        sdpa: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        queries: Stream,
        keys: Stream,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute the attention of each request alone. `query`, `key`, `value` and the result: (1, heads, tokens,
        channels), of these streams."""
        if kwargs.get("attn_mask") is not None:
            raise ConfigError("an attention of a packed step has a mask")
        split = (self._split(query, queries), self._split(key, keys), self._split(value, keys))
        return self._join(self._attend(sdpa, list(zip(*split, strict=True)), keys, kwargs), queries)

    def _attend(
        self,
        sdpa: Callable[..., torch.Tensor],
        requests: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        keys: Stream,
        kwargs: dict[str, Any],
    ) -> list[torch.Tensor]:
        """The attention of each request, of its queries, keys and values, (rows, heads, tokens, channels) each."""
        return [sdpa(*own, **kwargs) for own in requests]

    def _find_owners(self, stream: Stream) -> torch.Tensor:
        """The row of each token of a stream."""
        owners = {
            name: self._row_numbers.repeat_interleave(torch.tensor(counts).repeat_interleave(torch.tensor(self._rows)))
            for name, counts in (("image", self._image_tokens), ("text", self._text_tokens))
        }
        if stream != "joint":
            return owners[stream]
        return torch.cat([owners["text"], owners["image"]] if self._text_first else [owners["image"], owners["text"]])

    def _split(self, tokens: torch.Tensor, stream: Stream) -> list[torch.Tensor]:
        """Split (1, heads, tokens, channels) into (rows, heads, tokens, channels) of each request."""
        if stream != "joint":
            return self._split_stream(tokens, self._image_tokens if stream == "image" else self._text_tokens)
        total = sum(rows * count for rows, count in zip(self._rows, self._text_tokens, strict=True))
        text, image = split_text(tokens, total, self._text_first)
        pairs = zip(self._split(text, "text"), self._split(image, "image"), strict=True)
        return [join_text(of_text, of_image, self._text_first) for of_text, of_image in pairs]

    def _split_stream(self, tokens: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        heads, _, channels = tokens[0].shape
        split = torch.split(tokens[0], [rows * count for rows, count in zip(self._rows, counts, strict=True)], dim=1)
        return [
            part.view(heads, rows, -1, channels).transpose(0, 1) for rows, part in zip(self._rows, split, strict=True)
        ]

    def _join(self, parts: Sequence[torch.Tensor], stream: Stream) -> torch.Tensor:
        """Join what `_split` has split."""
        if stream != "joint":
            return torch.cat([part.transpose(0, 1).flatten(1, 2) for part in parts], dim=1)[None]
        pairs = [
            split_text(part, count, self._text_first) for part, count in zip(parts, self._text_tokens, strict=True)
        ]
        text, image = zip(*pairs, strict=True)
        return join_text(self._join(text, "text"), self._join(image, "image"), self._text_first)


def pack(tokens: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack the tokens of each request, (rows, tokens, channels), into one sequence, (all tokens, 1, channels)."""
    return torch.cat([own.flatten(0, 1) for own in tokens])[:, None]


def unpack_patches(tokens: torch.Tensor, sizes: Sequence[int], patch: Sequence[int]) -> torch.Tensor:
    """Unpack tokens, (rows, tokens, channels of a patch), into (rows, channels, *sizes)."""
    dims = len(sizes)
    grid = [size // side for size, side in zip(sizes, patch, strict=True)]
    interleaved = [axis for dim in range(1, dims + 1) for axis in (dim, dims + dim)]
    apart = tokens.reshape(len(tokens), *grid, *patch, -1)
    return apart.permute(0, 2 * dims + 1, *interleaved).reshape(len(tokens), -1, *sizes)


def install_joint_blocks(blocks: Iterable[Any]) -> None:
    """Hook blocks that modulate image and text tokens apart, and attend to both."""
    for block in blocks:
        install_attention(block.attn, "joint", "joint")
        install_modulation(block.norm1.linear, "image")
        install_modulation(block.norm1_context.linear, "text")


def install_attention(attention: torch.nn.Module, queries: Stream, keys: Stream) -> None:
    """Hook an attention whose queries are of one stream and whose keys and values are of another, or the same."""
    attention.forward = _pack_forward(attention.forward, queries, keys)


def install_modulation(layer: torch.nn.Module, stream: Stream) -> None:
    """Hook a layer that computes from each row what modulates the tokens of a stream."""

    def spread(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        active = _ACTIVE.get()
        return active.spread(output, stream) if active else None

    layer.register_forward_hook(spread)


def _pack_forward(stock: Callable[..., Any], queries: Stream, keys: Stream) -> Callable[..., Any]:
    """Wrap the stock forward of an attention, which gets a packed sequence as one row of tokens."""

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        active = _ACTIVE.get()
        if active is None:
            return stock(*args, **kwargs)
        as_row = [_turn(each) for each in args]
        compute = functools.partial(active.compute_attention, queries=queries, keys=keys)
        with RedirectedAttention(compute) as redirect:
            output = stock(*as_row, **{name: _turn(each) for name, each in kwargs.items()})
        redirect.check_calls(1, "in a packed step")
        return tuple(map(_turn, output)) if isinstance(output, tuple) else _turn(output)

    return forward


def _turn(tokens: Any) -> Any:
    """Turn tokens from the dimension of the batch to that of the sequence, or back. Rotary tables stay as they are."""
    return tokens.transpose(0, 1) if isinstance(tokens, torch.Tensor) else tokens
