"""Exact sequence parallelism by all-to-all (DeepSpeed Ulysses, arXiv 2309.14509, section 3), for joint attention.

Between attentions every rank holds a contiguous share of the image tokens and all text tokens. Inside an attention it
holds all tokens for its share of the heads: one all-to-all there, with queries, keys and values together, and one
back, in which the text output of every head reaches every rank. Text is short and computed by all ranks.

Hooks are installed once, when the model is loaded. They act inside `sequence_parallel(group)` only: degree 1 is the
stock path, and changing the degree is entering another context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from tridentserve.errors import ConfigError
from tridentserve.parallel.groups import SequenceGroup


class _Sharding:
    """How the image tokens of the running forward pass are shared among the ranks of a group."""

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self.sizes: list[int] = []

    def shard(self, tokens: torch.Tensor, num_heads: int) -> torch.Tensor:
        """This rank's image tokens, (batch, local, channels), of all, (batch, tokens, channels)."""
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
        """The rows of a positional table, (text + tokens, channels), that belong to what this rank holds."""
        text, *shards = torch.split(table, [table.shape[0] - sum(self.sizes), *self.sizes])
        return torch.cat([text, shards[self.group.rank]])

    def share(self, table: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's rows of a table with one row per image token along `dim`."""
        return table.tensor_split(self.group.size, dim=dim)[self.group.rank]

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """All image tokens, (batch, tokens, channels), on every rank."""
        batch, _, channels = shard.shape
        return torch.cat(self.group.all_gather(shard, [(batch, size, channels) for size in self.sizes]), dim=1)

    def attention(
        self,
        sdpa: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        text_first: bool,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention over all tokens. `query`, `key`, `value` and the result: (batch, heads, local + text, channels).

        The text, if any, stands before or after the image tokens, as the family has it.
        """
        group, sizes = self.group, self.sizes
        local = sizes[group.rank]
        batch, heads, length, channels = query.shape
        share = heads // group.size
        text, image = _split(torch.stack([query, key, value]), length - local, text_first)
        received = group.all_to_all(
            image.chunk(group.size, dim=2), [(3, batch, share, size, channels) for size in sizes]
        )
        text = text.chunk(group.size, dim=2)[group.rank]
        joint = _join(text, torch.cat(received, dim=3), text_first)
        if kwargs.get("attn_mask") is not None:
            kwargs["attn_mask"] = self._whole_mask(kwargs["attn_mask"], length - local, text_first)

        output = sdpa(*joint.unbind(0), **kwargs)

        text, image = _split(output, length - local, text_first)
        blocks = [_join(text, shard, text_first) for shard in torch.split(image, sizes, dim=2)]
        return torch.cat(group.all_to_all(blocks, [(batch, share, length, channels)] * group.size), dim=1)

    def _whole_mask(self, mask: torch.Tensor, text: int, text_first: bool) -> torch.Tensor:
        """A mask of keys, (batch, 1, 1, text + local), or of queries and keys, for all image tokens. Only text can be
        masked: image tokens are alike."""
        whole = self._of_all(mask.transpose(-1, -2), text, text_first).transpose(-1, -2)
        if mask.shape[-2] == 1:
            return whole
        _, image = _split(mask, text, text_first)
        if bool((image != image[..., :1, :]).any()):
            raise ConfigError(
                f"an attention masks image tokens one by one (mask of shape {tuple(mask.shape)}), which cannot be "
                "shared by several workers; use degree 1"
            )
        return self._of_all(whole, text, text_first)

    def _of_all(self, rows: torch.Tensor, text: int, text_first: bool) -> torch.Tensor:
        """Rows of a mask, (..., text + local, columns), with those of all image tokens."""
        of_text, image = _split(rows, text, text_first)
        everyone = image[..., :1, :].expand(*image.shape[:-2], sum(self.sizes), -1)
        return _join(of_text, everyone, text_first)


def _split(tokens: torch.Tensor, text: int, text_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Text and image tokens of (..., tokens, channels)."""
    start = 0 if text_first else tokens.shape[-2] - text
    image = tokens.narrow(-2, text, tokens.shape[-2] - text) if text_first else tokens.narrow(-2, 0, start)
    return tokens.narrow(-2, start, text), image


def _join(text: torch.Tensor, image: torch.Tensor, text_first: bool) -> torch.Tensor:
    return torch.cat([text, image] if text_first else [image, text], dim=-2)


_ACTIVE: ContextVar[_Sharding | None] = ContextVar("sequence_parallel", default=None)
# What compiled code may know of `_ACTIVE`, which torch.compile cannot look into: it has a version for each value.
_compiled_in_group = False


@contextmanager
def sequence_parallel(group: SequenceGroup | None) -> Iterator[None]:
    """Inside, the transformers that were hooked run on all members of `group` together, each called with the same
    arguments; all get the whole result. None, or a group of one, is the stock path.

    Raises (from the forward pass) `ConfigError` before any collective when the heads cannot be shared by the group,
    and `GroupError` when a member is lost.
    """
    token = _ACTIVE.set(_Sharding(group) if group is not None and group.size > 1 else None)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def current_group() -> SequenceGroup | None:
    """The group of the `sequence_parallel` that we are in; None at degree 1."""
    active = _ACTIVE.get()
    return active.group if active else None


def is_first() -> bool:
    """Whether we are the first member of the current group, or alone."""
    group = current_group()
    return group is None or group.rank == 0


def install(
    embedder: torch.nn.Module,
    attentions: Iterable[torch.nn.Module],
    output: torch.nn.Module,
    *,
    num_heads: int,
    text_first: bool,
    positions: torch.nn.Module | None = None,
    joint_positions: bool = True,
    rotated: Iterable[torch.nn.Module] = (),
) -> None:
    """Hook one transformer.

    `embedder` gives the image tokens (batch, tokens, channels); they are shared out there. `attentions` are the joint
    and the image-only attentions, with `num_heads` heads each; `text_first` says where text stands in them. `output`
    is the last layer; image tokens are gathered after it. `positions` gives rotary tables, (text + tokens, channels)
    each, and runs after the embedder; with `joint_positions` False it gives one of image and one of text tokens.
    `rotated` are modules that are given such tables as `image_rotary_emb`.
    """
    embedder.register_forward_hook(functools.partial(_shard_tokens, num_heads))
    output.register_forward_hook(_gather_tokens)
    if positions is not None:
        positions.register_forward_hook(_shard_positions if joint_positions else _shard_image_positions)
    for module in rotated:
        module.register_forward_pre_hook(_shard_rotary, with_kwargs=True)
    for attention in attentions:
        attention.forward = _sharded_forward(attention.forward, text_first)


def install_blocks(
    first_block: torch.nn.Module,
    attentions: Iterable[torch.nn.Module],
    output: torch.nn.Module,
    *,
    num_heads: int,
    text_first: bool,
    positions: torch.nn.Module | None = None,
    positions_dim: int = 0,
    call_per_sample: bool = False,
) -> None:
    """As `install`, for a transformer whose embedder gives no tokens (a convolution over frames) or text as well.

    The image tokens are shared out where they enter `first_block`, as its argument `hidden_states`. `positions` gives
    rotary tables with a row per image token along `positions_dim` and none for text; it may run before that.
    `call_per_sample`: the attentions call SDPA once for each row of the batch, whose texts differ in length.
    """
    first_block.register_forward_pre_hook(functools.partial(_shard_input, num_heads), with_kwargs=True)
    output.register_forward_hook(_gather_tokens)
    if positions is not None:
        positions.register_forward_hook(functools.partial(_share_positions, positions_dim))
    for attention in attentions:
        attention.forward = _sharded_forward(attention.forward, text_first, call_per_sample)


def share(table: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This rank's rows of a table with one row per image token along `dim`; all of them outside a group."""
    active = _ACTIVE.get()
    return active.share(table, dim) if active else table


def tell_compiled_code() -> None:
    """To be called before compiled code that holds hooked attentions: in a group they are left out of it, and run as
    they are; outside they are compiled with the rest."""
    global _compiled_in_group
    _compiled_in_group = _ACTIVE.get() is not None


def _shard_input(num_heads: int, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    active = _ACTIVE.get()
    if active is None:
        return None
    if args:
        return (active.shard(args[0], num_heads), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": active.shard(kwargs["hidden_states"], num_heads)}


def _share_positions(dim: int, module: torch.nn.Module, args: Any, output: Any) -> Any:
    return tuple(share(table, dim) for table in output)


def _shard_tokens(num_heads: int, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
    active = _ACTIVE.get()
    return active.shard(output, num_heads) if active else None


def _shard_positions(module: torch.nn.Module, args: Any, output: Any) -> Any:
    active = _ACTIVE.get()
    return tuple(active.shard_positions(table) for table in output) if active else None


def _shard_image_positions(module: torch.nn.Module, args: Any, output: Any) -> Any:
    active = _ACTIVE.get()
    return (active.share(output[0], dim=0), *output[1:]) if active else None


def _shard_rotary(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    active, tables = _ACTIVE.get(), kwargs.get("image_rotary_emb")
    if active is None or tables is None:
        return None
    return args, kwargs | {"image_rotary_emb": tuple(active.shard_positions(table) for table in tables)}


def refuse(module: torch.nn.Module, family: str) -> None:
    """Make a model that cannot be shared out say so, with `ConfigError`, when it is run by a group."""

    def check(module: torch.nn.Module, args: Any) -> None:
        if _ACTIVE.get() is not None:
            raise ConfigError(f"models of the family {family} run on one worker at a time; use degree 1 for them")

    module.register_forward_pre_hook(check)


def _gather_tokens(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
    active = _ACTIVE.get()
    return active.gather(output) if active else None


def _sharded_forward(stock: Callable[..., Any], text_first: bool, call_per_sample: bool = False) -> Callable[..., Any]:
    """The stock forward of an attention, whose calls of SDPA, one or one per sample, become parallel in a group."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def uncompiled(*args: Any, **kwargs: Any) -> Any:
        active = _ACTIVE.get()
        if active is None:
            return stock(*args, **kwargs)
        with _UlyssesRedirect(active, text_first) as redirect:
            result = stock(*args, **kwargs)
        expected = len((args or (kwargs["hidden_states"],))[0]) if call_per_sample else 1
        if redirect.calls != expected:
            raise ConfigError(
                f"an attention called scaled_dot_product_attention {redirect.calls} times, not "
                f"{'once' if expected == 1 else f'{expected} times'}; under sequence parallelism use the native "
                "attention backend"
            )
        return result

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not _compiled_in_group:
            return stock(*args, **kwargs)
        return uncompiled(*args, **kwargs)

    return forward


class _UlyssesRedirect(TorchFunctionMode):
    """Sends calls of SDPA to a sharding: processors of all families, old and new, end in that function."""

    def __init__(self, sharding: _Sharding, text_first: bool) -> None:
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
        return self.sharding.attention(func, *args, text_first=self.text_first, **kwargs)
