"""Exact sequence parallelism by all-to-all (DeepSpeed Ulysses, arXiv 2309.14509, section 3), for joint attention.

Hooks are installed once, when the model is loaded. They act inside `sequence_parallel(group)` only: degree 1 is the
stock path, and a change of the degree is another context. `token_sharding` holds the collectives that the hooks call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tridentserve.parallel.attention_calls import (
    RedirectedAttention,
    choose_attention,
    choose_compiled_attention,
)
from tridentserve.parallel.collectives import CollectiveGroup
from tridentserve.parallel.token_sharding import CURRENT_SHARDING, AttentionKind, TokenSharding

# Stands for `CURRENT_SHARDING` in compiled code, since torch.compile cannot read context variables. Each value has a
# version of the code.
_compiled_in_group = False


@contextmanager
def sequence_parallel(group: CollectiveGroup | None) -> Iterator[None]:
    """Inside the context, all members of `group` run the hooked transformers together. Each member calls them with the
    same arguments and gets the whole result. None, or a group of one, is the stock path.

    The forward pass raises `ConfigError` before any collective when the group cannot share the tokens, and `GroupError`
    when a member is lost.
    """
    token = CURRENT_SHARDING.set(TokenSharding(group) if group is not None and group.size > 1 else None)
    try:
        yield
    finally:
        CURRENT_SHARDING.reset(token)


def get_current_sharding() -> TokenSharding | None:
    """The sharing of image tokens in the current `sequence_parallel` context, or None at degree 1."""
    return CURRENT_SHARDING.get()


def get_current_group() -> CollectiveGroup | None:
    """The group of the current `sequence_parallel` context, or None at degree 1."""
    active = CURRENT_SHARDING.get()
    return active.group if active else None


def is_first() -> bool:
    """True on the first member of the current group, and at degree 1."""
    group = get_current_group()
    return group is None or group.rank == 0


def install(
    embedder: torch.nn.Module,
    attentions: Iterable[torch.nn.Module],
    output: torch.nn.Module,
    *,
    text_first: bool,
    positions: torch.nn.Module | None = None,
    joint_positions: bool = True,
    rotated: Iterable[torch.nn.Module] = (),
) -> None:
    """Hook one transformer.

    `embedder` returns the image tokens (batch, tokens, channels), which its hook shares out. `attentions` are the joint
    and the image-only attentions; in their inputs text stands before the image tokens if `text_first` is True, and
    behind them otherwise. `output` is the last layer; its hook gathers the image tokens and drops text that is
    beside them. `positions` returns rotary tables, (text + tokens, channels) each, and runs after the embedder; with
    `joint_positions` False it returns one table of image and one of text tokens. `rotated` are the modules that take
    such tables as the argument `image_rotary_emb`.
    """
    embedder.register_forward_hook(_shard_tokens)
    output.register_forward_hook(functools.partial(_gather_tokens, text_first))
    if positions is not None:
        positions.register_forward_hook(_shard_positions if joint_positions else _shard_image_positions)
    for module in rotated:
        module.register_forward_pre_hook(_shard_rotary, with_kwargs=True)
    for attention in attentions:
        attention.forward = _shard_forward(attention.forward, _see_all(text_first))


def install_blocks(
    first_block: torch.nn.Module,
    attentions: Iterable[torch.nn.Module],
    output: torch.nn.Module,
    *,
    text_first: bool,
    positions: torch.nn.Module | None = None,
    positions_dim: int = 0,
    call_per_sample: bool = False,
    readers: Iterable[torch.nn.Module] = (),
) -> None:
    """Hook one transformer whose embedder returns no tokens (a convolution over frames) or text tokens as well.

    The image tokens are shared out where they enter `first_block`, as its argument `hidden_states`. `positions` returns
    rotary tables with a row per image token along `positions_dim` and none for text; it may run before the first block.
    `call_per_sample` is True where the attentions call SDPA once for each row of the batch, since texts differ in
    length. `readers` are attentions from tokens that every rank has, such as those of sound, to the image tokens. The
    other arguments are those of `install`.
    """
    first_block.register_forward_pre_hook(_shard_input, with_kwargs=True)
    output.register_forward_hook(functools.partial(_gather_tokens, text_first))
    if positions is not None:
        positions.register_forward_hook(functools.partial(_share_positions, positions_dim))
    for attention in attentions:
        attention.forward = _shard_forward(attention.forward, _see_all(text_first), call_per_sample)
    for attention in readers:
        attention.forward = _shard_forward(attention.forward, "read image")


def share(table: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Select this rank's rows of a table with one row per image token along `dim`, or all of them outside a group."""
    active = CURRENT_SHARDING.get()
    return active.share(table, dim) if active else table


def note_group_for_compiled_code() -> None:
    """Prepare for a call of compiled code that holds hooked attentions: inside a group they are one operator each."""
    global _compiled_in_group
    _compiled_in_group = CURRENT_SHARDING.get() is not None


def _shard_input(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    active = CURRENT_SHARDING.get()
    if active is None:
        return None
    if args:
        return (active.shard(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": active.shard(kwargs["hidden_states"])}


def _share_positions(dim: int, module: torch.nn.Module, args: Any, output: Any) -> Any:
    return tuple(share(table, dim) for table in output)


def _shard_tokens(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
    active = CURRENT_SHARDING.get()
    return active.shard(output) if active else None


def _shard_positions(module: torch.nn.Module, args: Any, output: Any) -> Any:
    active = CURRENT_SHARDING.get()
    return tuple(active.shard_positions(table) for table in output) if active else None


def _shard_image_positions(module: torch.nn.Module, args: Any, output: Any) -> Any:
    active = CURRENT_SHARDING.get()
    return (active.share(output[0], dim=0), *output[1:]) if active else None


def _shard_rotary(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    active, tables = CURRENT_SHARDING.get(), kwargs.get("image_rotary_emb")
    if active is None or tables is None:
        return None
    return args, kwargs | {"image_rotary_emb": tuple(active.shard_positions(table) for table in tables)}


def _gather_tokens(text_first: bool, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
    active = CURRENT_SHARDING.get()
    return active.gather(active.select_image(output, text_first)) if active else None


def _see_all(text_first: bool) -> AttentionKind:
    return "text first" if text_first else "text last"


def _shard_forward(stock: Callable[..., Any], kind: AttentionKind, call_per_sample: bool = False) -> Callable[..., Any]:
    """Wrap the stock forward of an attention so that in a group its calls of SDPA, one or one per sample, are
    shared."""

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            compute = choose_compiled_attention(kind) if _compiled_in_group else None
        else:
            compute = choose_attention(kind)
        if compute is None:
            return stock(*args, **kwargs)
        redirect = RedirectedAttention(compute)
        with redirect:  # `as` would end the compiler's graph
            result = stock(*args, **kwargs)
        expected = len((args or (kwargs["hidden_states"],))[0]) if call_per_sample else 1
        redirect.check_calls(expected, "under sequence parallelism")
        return result

    return forward
