"""Sends the attention of stock processors, all of which end in torch's scaled_dot_product_attention (SDPA), to the
sharding of the current context.

Inside compiled code it is one operator of torch. The compiler sees neither the group nor its collectives, which the
operator looks up where it runs: one compilation serves all groups, ranks and degrees.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from tridentserve.errors import ConfigError
from tridentserve.parallel.token_sharding import CURRENT_SHARDING, AttentionKind

Compute = Callable[..., torch.Tensor]
"""Computes the attention of a call of SDPA: called with SDPA itself and its arguments."""


class RedirectedAttention(TorchFunctionMode):
    """Inside this context calls of SDPA go to another function."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self._compute = compute
        self._calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            self._calls += 1
            return self._compute(func, *args, **kwargs)
        name = func.__name__ if isinstance(func, FunctionType) else ""
        if name and getattr(torch.Tensor, name, None) is func:
            # The compiler knows methods that are written in Python (`unflatten`) where they are called as such.
            return getattr(args[0], name)(*args[1:], **kwargs)
        return func(*args, **kwargs)

    def check_calls(self, expected: int, purpose: str) -> None:
        """Raise `ConfigError` unless the attention has called SDPA as often as expected. Otherwise it has attended to
        something else."""
        if self._calls != expected:
            raise ConfigError(
                f"an attention called scaled_dot_product_attention {self._calls} times, not "
                f"{'once' if expected == 1 else f'{expected} times'}; {purpose} use the native attention backend"
            )


def choose_attention(kind: AttentionKind) -> Compute | None:
    """The attention of this kind in the current group; None outside of a group."""
    active = CURRENT_SHARDING.get()
    return active.choose_attention(kind) if active is not None else None


def choose_compiled_attention(kind: AttentionKind) -> Compute:
    """The same for code that is being compiled, which will run in groups only."""
    return functools.partial(_call_operator, kind)


def order_calls(graph: torch.fx.GraphModule) -> None:
    """Have each call of the operator in a graph get the result of the one before, also where nothing else depends on
    it: the compiler must not change their order, which is that of the collectives on all ranks."""
    calls = [node for node in graph.graph.nodes if node.target == torch.ops.tridentserve.share_attention.default]
    for before, call in itertools.pairwise(calls):
        call.args = (*call.args[:-1], before)
    graph.recompile()


def _call_operator(
    kind: AttentionKind,
    sdpa: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The arguments behind `sdpa`, which is not called here, are SDPA's."""
    output: torch.Tensor = _share_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, kind, None
    )
    return output


@torch.library.custom_op("tridentserve::share_attention", mutates_args=())
def _share_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    kind: str,
    before: torch.Tensor | None,
) -> torch.Tensor:
    """`before` is there for the order of calls alone."""
    compute = choose_attention(cast(AttentionKind, kind))
    assert compute is not None, "compiled for groups, and called outside of one"
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    output = compute(scaled_dot_product_attention, query, key, value, attn_mask=attn_mask, **options)
    return output.transpose(1, 2).contiguous().transpose(1, 2)


@_share_attention.register_fake
def _allocate_output(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The compiler is told that tokens stand before heads in memory, as processors want them next."""
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
