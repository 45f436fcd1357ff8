"""Denoising steps that run the first block of a transformer only, and take what the other blocks add from an earlier
step (first-block cache; the idea is that of TeaCache, arXiv 2411.19108).

Each row of a forward pass, which is one output in one pass of guidance, decides for itself: where the first block adds
about what it added at the last step that was computed whole, so do the others. All that a decision needs is a part of
the request's state. So it does not depend on the batch, the worker or the degree.

Blocks are hooked when the first such request comes. The hooks act inside `use_block_cache` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock

from tridentserve.parallel.head_exchange import join_text, split_text
from tridentserve.parallel.ulysses import get_current_sharding
from tridentserve.pipelines.context_values import hold_value

# The blocks of the other families are known to diffusers.
TransformerBlockRegistry.register(HunyuanVideo15TransformerBlock, TransformerBlockMetadata(0, 1))


@dataclass
class BlockResiduals:
    """The sums that the blocks of a transformer added to the image tokens at the last step that was computed whole."""

    first: torch.Tensor
    """By the first block: (rows, tokens, channels)."""
    others: torch.Tensor
    """By all other blocks, of the same shape."""
    known: torch.Tensor
    """False for rows that have not been computed yet, (rows,)."""

    def select(self, rows: slice) -> BlockResiduals:
        return BlockResiduals(self.first[rows], self.others[rows], self.known[rows])


@dataclass(frozen=True, slots=True)
class JoinedStream:
    """The place of the image tokens in blocks that have text among them, or some of whose blocks do."""

    image_tokens: int
    """Their number, on all members of a group together."""
    text_first: bool
    """True where text stands before them."""

    def split(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split (rows, local tokens, channels) into text, which may be none, and image."""
        sharding = get_current_sharding()
        count = self.image_tokens if sharding is None else sharding.sizes[sharding.group.rank]
        return split_text(tokens, tokens.shape[1] - count, self.text_first)

    def join(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return join_text(text, image, self.text_first)


class CachedPass:
    """One forward pass whose rows may leave out all blocks but the first."""

    def __init__(self, limits: torch.Tensor, before: BlockResiduals | None, stream: JoinedStream | None = None) -> None:
        """`limits`: of the relative change up to which a row leaves them out, (rows,), on the CPU; rows with 0 always
        compute them. `before`: of all tokens; None where no row has been computed. `stream`: of blocks that have text
        among the image tokens."""
        self._limits = limits
        self._before = before
        self._stream = stream
        self._first_output: torch.Tensor | None = None
        self._first: torch.Tensor | None = None
        self.computed = torch.ones(len(limits), dtype=torch.bool)
        """The rows that have been computed whole, on the CPU."""
        self.after: BlockResiduals | None = before
        """Sums that the next step may take over, of all tokens."""

    @property
    def computes(self) -> bool:
        """False where no row needs the other blocks."""
        return bool(self.computed.any())

    def decide(self, entering: torch.Tensor, leaving: torch.Tensor) -> None:
        """Decide by the tokens that enter and leave the first block, (rows, local tokens, channels)."""
        entering, leaving = self._select_image(entering), self._select_image(leaving)
        self._first_output, self._first = leaving, leaving - entering
        if self._before is None:
            return
        before = _select_own_tokens(self._before.first)
        sums = torch.stack([(self._first - before).abs(), before.abs()]).sum((-2, -1), dtype=torch.float64)
        change, size = _add_up(sums).cpu()
        # A change of 0 at a limit of 0 is computed too: `exact` is exact by what it does, not by what it finds.
        self.computed = ~((change <= self._limits * size) & (self._limits > 0) & self._before.known.cpu())

    def finish(self, leaving: torch.Tensor) -> torch.Tensor:
        """Complete the tokens that leave the last block, (rows, local tokens, channels). Those of text, of which the
        transformer has no more use, stay as they are."""
        if self._stream is None:
            return self._finish_image(leaving)
        text, image = self._stream.split(leaving)
        return self._stream.join(text, self._finish_image(image))

    def _select_image(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self._stream is None else self._stream.split(tokens)[1]

    def _finish_image(self, leaving: torch.Tensor) -> torch.Tensor:
        assert self._first_output is not None, "the first block did not run"
        assert self._first is not None
        computed = self.computed.to(leaving.device)[:, None, None]
        if self._before is not None and not self.computed.all():
            taken_over = self._first_output + _select_own_tokens(self._before.others)
            leaving = torch.where(computed, leaving, taken_over) if self.computes else taken_over
        if self.computes:
            added = torch.stack([self._first, leaving - self._first_output])
            first, others = _gather_tokens(added)
            if self._before is not None:
                first = torch.where(computed, first, self._before.first)
                others = torch.where(computed, others, self._before.others)
            self.after = BlockResiduals(first, others, torch.ones_like(self.computed))
        return leaving


_ACTIVE: ContextVar[CachedPass | None] = ContextVar("block_cache", default=None)


def use_block_cache(cached: CachedPass) -> AbstractContextManager[None]:
    """Have the hooked transformers run this pass."""
    return hold_value(_ACTIVE, cached)


def install(blocks: Sequence[torch.nn.Module]) -> None:
    """Hook the blocks of a transformer, in the order in which they run, at least two. Compiled ones stay compiled."""
    first, *middle, last = blocks
    first.forward = _decide_after(first)
    for block in middle:
        block.forward = _leave_out(block)
    last.forward = _finish_after(last)


def _decide_after(block: torch.nn.Module) -> Callable[..., Any]:
    stock, layout = block.forward, TransformerBlockRegistry.get(type(block))

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        if (cached := _ACTIVE.get()) is not None:
            cached.decide(_read(layout, "hidden_states", args, kwargs), _read_image_tokens(layout, output))
        return output

    return forward


def _leave_out(block: torch.nn.Module) -> Callable[..., Any]:
    stock, layout = block.forward, TransformerBlockRegistry.get(type(block))

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        cached = _ACTIVE.get()
        return stock(*args, **kwargs) if cached is None or cached.computes else _pass_on(layout, args, kwargs)

    return forward


def _finish_after(block: torch.nn.Module) -> Callable[..., Any]:
    stock, layout = _leave_out(block), TransformerBlockRegistry.get(type(block))

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        if (cached := _ACTIVE.get()) is None:
            return output
        finished = cached.finish(_read_image_tokens(layout, output))
        if not isinstance(output, tuple):
            return finished
        return tuple(
            finished if index == layout.return_hidden_states_index else each for index, each in enumerate(output)
        )

    return forward


def _pass_on(layout: TransformerBlockMetadata, args: Any, kwargs: Any) -> Any:
    """Return the input of a block in the form of its output."""
    hidden = _read(layout, "hidden_states", args, kwargs)
    if layout.return_encoder_hidden_states_index is None:
        return hidden
    passed = {
        layout.return_hidden_states_index: hidden,
        layout.return_encoder_hidden_states_index: _read(layout, "encoder_hidden_states", args, kwargs),
    }
    return tuple(passed[index] for index in range(2))


def _read(layout: TransformerBlockMetadata, name: str, args: Any, kwargs: Any) -> Any:
    if name == "hidden_states" and args:  # the first parameter of all blocks, which Z-Image's name otherwise
        return args[0]
    return layout._get_parameter_from_args_kwargs(name, args, kwargs)


def _read_image_tokens(layout: TransformerBlockMetadata, output: Any) -> torch.Tensor:
    tokens: torch.Tensor = output[layout.return_hidden_states_index] if isinstance(output, tuple) else output
    return tokens


def _select_own_tokens(tokens: torch.Tensor) -> torch.Tensor:
    sharding = get_current_sharding()
    return tokens if sharding is None else sharding.shard(tokens)


def _gather_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """All tokens of (2, rows, local tokens, channels), on every member."""
    sharding = get_current_sharding()
    if sharding is None:
        return tokens
    whole = sharding.gather(tokens.flatten(0, 1))
    return whole.view(*tokens.shape[:2], *whole.shape[1:])


def _add_up(sums: torch.Tensor) -> torch.Tensor:
    """Sums over the tokens of all members, on every member, in one order."""
    sharding = get_current_sharding()
    if sharding is None:
        return sums
    return torch.stack(sharding.group.all_gather(sums, [tuple(sums.shape)] * sharding.group.size)).sum(0)
