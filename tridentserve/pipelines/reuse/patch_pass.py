"""Denoising steps of a U-Net that compute its transformer blocks for some patches of an image only, and take what the
blocks add to the others from an earlier step (patch-level cache of PatchedServe, arXiv 2501.09253, section 5).

Each patch of each row, which is one output in one pass of guidance, decides for itself, where it enters the blocks that
stand behind one another (`Transformer2DModel`): a small predictor is asked if they would add about what they added when
the patch was last computed. The patches that are computed attend to all of their image, of which the others have what
they took over. Convolutions and group norms see whole images at every step. All that a decision needs is a part of the
request's state. So it does not depend on the batch, the worker or the degree.

The stacks of blocks are hooked when the first such request comes. The hooks act inside `use_patch_passes` only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel

from tridentserve.errors import ConfigError
from tridentserve.pipelines.adapters.patched_unet import PatchLayout, get_current_layout, without_layout
from tridentserve.pipelines.context_values import hold_value
from tridentserve.pipelines.reuse.predictor import ReusePredictor

# The side of a patch, in latent pixels, where an image can be cut so; else the largest fraction by a power of two.
_SIDE = 16


@dataclass(frozen=True, slots=True)
class KeptStack:
    """The tensors that a stack of blocks keeps of the rows of a call, in the order of their pixels."""

    entering: torch.Tensor
    """The tokens that entered it when they were last computed, (rows, tokens, channels)."""
    added: torch.Tensor
    """The tokens that each of its blocks added to them then, (rows, blocks, tokens, channels)."""


class PatchGrid(NamedTuple):
    """The numbers of patches of an image."""

    high: int
    wide: int

    @classmethod
    def choose(cls, size: Sequence[int], levels: int) -> PatchGrid:
        """The grid of latents of this size, (..., height, width), whatever they share steps with. An image whose
        patches would be less than a pixel on the coarsest of the U-Net's levels is one patch."""
        height, width = size[-2:]
        side = math.gcd(height, width, _SIDE)
        return cls(1, 1) if side < 2 ** (levels - 1) else cls(height // side, width // side)

    def list_tokens(self, height: int, width: int) -> torch.Tensor:
        """The numbers of the tokens of each patch, (patches, tokens), on a level of this size."""
        numbers = torch.arange(height * width).view(self.high, height // self.high, self.wide, width // self.wide)
        return numbers.transpose(1, 2).reshape(self.high * self.wide, -1)


@dataclass(frozen=True, slots=True)
class PassRows:
    """The rows of requests of one size in one call of the U-Net."""

    grid: PatchGrid
    limits: torch.Tensor
    """The relative change up to which results are used again, (rows, 1), on the CPU; 0: never."""
    steps: torch.Tensor
    """The share of the request's steps that are done, (rows, 1), on the CPU."""
    known: torch.Tensor
    """False for rows of which nothing is kept, (rows, 1), on the CPU."""


class StackPass(Protocol):
    """One call of the U-Net for requests of one size."""

    def compute(
        self, number: int, place: float, blocks: Sequence[Any], tokens: torch.Tensor, text: torch.Tensor, height: int
    ) -> torch.Tensor:
        """Compute the blocks of a stack. `number` and `place` (from 0 to 1) are its own in the U-Net, `tokens` (rows,
        tokens, channels) are those of images of this `height`, row by row of pixels. Returns the tokens that leave
        it."""


class PatchPass:
    """One call of the U-Net that takes over what may be taken over."""

    def __init__(self, rows: PassRows, before: Mapping[int, KeptStack], predictor: ReusePredictor) -> None:
        """`before`: by the number of the stack; empty where nothing is known of any row. Its tensors are not
        changed."""
        self._rows, self._before, self._predictor = rows, before, predictor
        self.after: dict[int, KeptStack] = {}
        """The same after the call."""
        self.skipped: list[torch.Tensor] = []
        """The share of the patches that each stack has not computed, (rows,) each, on the CPU."""

    @property
    def keeps(self) -> bool:
        """False where all rows are made exactly."""
        return bool((self._rows.limits > 0).any())

    def compute(
        self, number: int, place: float, blocks: Sequence[Any], tokens: torch.Tensor, text: torch.Tensor, height: int
    ) -> torch.Tensor:
        """Compute the patches whose results are not used again: see `StackPass`."""
        if not self.keeps:
            return compute_blocks(blocks, tokens, text)[0]
        patches = self._rows.grid.list_tokens(height, tokens.shape[1] // height).to(tokens.device)
        kept = self._before.get(number)
        reused = self.decide(place, tokens, kept, patches)
        self.skipped.append(reused.double().mean(1))
        if kept is None or not reused.any():
            leaving, added = compute_blocks(blocks, tokens, text)
            self.after[number] = KeptStack(tokens, added)
            return leaving
        chosen = _ComputedPatches(reused, patches)
        leaving, added = chosen.compute(blocks, tokens, text, kept.added)
        self.after[number] = KeptStack(torch.where(chosen.tokens[..., None], tokens, kept.entering), added)
        return leaving

    def decide(self, place: float, tokens: torch.Tensor, kept: KeptStack | None, patches: torch.Tensor) -> torch.Tensor:
        """True for patches that are not computed, (rows, patches), on the CPU."""
        rows = self._rows
        if kept is None:
            return torch.zeros(len(tokens), len(patches), dtype=torch.bool)
        change = measure_change(tokens, kept.entering, patches)
        return self._predictor.allows(change, place, rows.steps, rows.limits) & rows.known


def measure_change(tokens: torch.Tensor, before: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
    """The mean change of each patch relative to its size before, (rows, patches), in float64 on the CPU. `tokens` and
    `before`: (rows, tokens, channels); `patches`: the numbers of the tokens of each."""
    both = torch.stack([tokens - before, before]).abs().sum(-1, dtype=torch.float32)
    change, size = both[:, :, patches].sum(-1, dtype=torch.float64).cpu().unbind()
    return change / size.clamp(min=1e-12)


class _ComputedPatches:
    """The patches of each row that are computed. The rows of a batch need not have as many: those with fewer compute
    others beside them, whose results are dropped, so that what becomes of a row does not depend on the others."""

    def __init__(self, reused: torch.Tensor, patches: torch.Tensor) -> None:
        """`reused`: (rows, patches), on the CPU. `patches`: the tokens of each."""
        self._most = int((~reused).sum(1).max())
        order = reused.to(torch.uint8).argsort(dim=1, stable=True)[:, : self._most].to(patches.device)
        self._index = patches[order].flatten(1)
        # By token, True where it is computed.
        tokens = torch.empty(len(reused), patches.numel(), dtype=torch.bool, device=patches.device)
        tokens[:, patches.flatten()] = (~reused).to(patches.device).repeat_interleave(patches.shape[1], dim=1)
        self.tokens = tokens

    def compute(
        self, blocks: Sequence[Any], tokens: torch.Tensor, text: torch.Tensor, known: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute blocks as `compute_blocks` does, with what they added before (`known`) for the patches that are not
        computed."""
        added = known
        if self._most:
            added = known.clone()
            keeps = self.tokens.gather(1, self._index)[..., None]
        for number, block in enumerate(blocks):
            if self._most:
                new, old = self._compute_block(block, tokens, text), self._select(added[:, number])
                added[:, number].scatter_(1, self._expand(tokens), torch.where(keeps, new, old))
            tokens = tokens + added[:, number]
        return tokens, added

    def _compute_block(self, block: Any, tokens: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Compute the sum that a block adds to the chosen tokens, which attend to all."""
        before, normed = self._select(tokens), block.norm1(tokens)
        own = before + block.attn1(self._select(normed), encoder_hidden_states=normed)
        own = own + block.attn2(block.norm2(own), encoder_hidden_states=text)
        own = own + block.ff(block.norm3(own))
        added: torch.Tensor = own - before
        return added

    def _select(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.gather(1, self._expand(tokens))

    def _expand(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._index[..., None].expand(-1, -1, tokens.shape[-1])


def compute_blocks(
    blocks: Sequence[Any], tokens: torch.Tensor, text: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that leave blocks, and what each of them has added, (rows, blocks, tokens, channels)."""
    added = []
    for block in blocks:
        leaving = block(tokens, encoder_hidden_states=text)
        added.append(leaving - tokens)
        tokens = leaving
    return tokens, torch.stack(added, dim=1)


_ACTIVE: ContextVar[Sequence[StackPass] | None] = ContextVar("patch_passes", default=None)


def use_patch_passes(passes: Sequence[StackPass]) -> AbstractContextManager[None]:
    """Have the hooked stacks run these passes: one, or in a packed step one for each size, in the order of the
    layout."""
    return hold_value(_ACTIVE, passes)


def list_stacks(unet: Any) -> list[Any]:
    """The stacks of transformer blocks of a U-Net, in the order in which they run."""
    parts = [*unet.down_blocks, unet.mid_block, *unet.up_blocks]
    return [stack for part in parts if part is not None for stack in getattr(part, "attentions", None) or ()]


def install_reuse(unet: Any) -> None:
    """Hook the stacks of a U-Net, once. Raises `ConfigError` for blocks that are none of SDXL's."""
    stacks = list_stacks(unet)
    for number, stack in enumerate(stacks):
        if not isinstance(stack, Transformer2DModel) or any(
            block.norm_type != "layer_norm" for block in stack.transformer_blocks
        ):
            raise ConfigError(f"patches of {type(stack).__name__} cannot be used again; ask for `quality: exact`")
        stack.forward = _hook(stack, number, number / max(len(stacks) - 1, 1))


def _hook(stack: Any, number: int, place: float) -> Callable[..., Any]:
    stock = stack.forward

    def compute(one: StackPass, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        tokens, channels = stack._operate_on_continuous_inputs(hidden)
        rows, _, height, width = hidden.shape
        leaving = one.compute(number, place, stack.transformer_blocks, tokens, text, height)
        image: torch.Tensor = stack._get_output_for_continuous_inputs(leaving, hidden, rows, height, width, channels)
        return image

    @functools.wraps(stock)
    def forward(hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        if (passes := _ACTIVE.get()) is None:
            return stock(hidden_states, encoder_hidden_states=encoder_hidden_states, **kwargs)
        given = [name for name, value in kwargs.items() if value is not None and name != "return_dict"]
        if given:
            raise ConfigError(f"patches cannot be used again with {', '.join(given)}; ask for `quality: exact`")
        layout = get_current_layout()
        if layout is None:
            (one,) = passes
            return (compute(one, hidden_states, encoder_hidden_states),)
        return (_compute_sizes(layout, passes, compute, hidden_states, encoder_hidden_states),)

    return forward


def _compute_sizes(
    layout: PatchLayout,
    passes: Sequence[StackPass],
    compute: Callable[[StackPass, torch.Tensor, torch.Tensor], torch.Tensor],
    patches: torch.Tensor,
    text: torch.Tensor,
) -> torch.Tensor:
    """Compute a stack in a packed step: for the images of each size as if these were alone."""
    images, texts = layout.join_sizes(patches), layout.split_images(text)
    with without_layout():
        computed = [compute(*own) for own in zip(passes, images, texts, strict=True)]
    return layout.cut(computed, patches.shape[-1])
