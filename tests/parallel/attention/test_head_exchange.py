"""An attention of a group copies each tensor once before it is sent and once where it comes in, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.members import Member, Pool
from tridentserve.parallel.token_sharding import TokenSharding

CHANNELS, HEADS, IMAGE_TOKENS = 16, 4, 24
# Operators that write down what they read.
COPYING = {"cat", "clone", "contiguous", "copy_", "index", "index_select", "stack", "_to_copy"}


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that copying operators write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func._opname in COPYING:
            self.total += output.nbytes
        return output


def make_projections(batch: int, length: int) -> list[torch.Tensor]:
    """Queries, keys and values (batch, heads, tokens, channels), as processors make them of (batch, tokens, channels of
    all heads)."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(batch, length, HEADS, CHANNELS, generator=generator).transpose(1, 2) for _ in range(3)]


def attend_together(member: Member, batch: int, text: int, text_first: bool) -> tuple[float, Any, list[int]]:
    """Bytes that one attention copies, in sizes of this member's queries; its result, as processors go on with it; and
    the rows of all tokens that this is."""
    sharding = TokenSharding(member.group("heads"))
    sharding.shard(torch.zeros(1, IMAGE_TOKENS, 1))
    mine = sharding.sizes[member.rank]
    first = (text if text_first else 0) + sum(sharding.sizes[: member.rank])
    image, rows_of_text = (
        range(first, first + mine),
        range(text) if text_first else range(IMAGE_TOKENS, IMAGE_TOKENS + text),
    )
    rows = [*rows_of_text, *image] if text_first else [*image, *rows_of_text]
    projections = [
        whole.transpose(1, 2)[:, rows].transpose(1, 2) for whole in make_projections(batch, IMAGE_TOKENS + text)
    ]
    query, key, value = projections
    with CopiedBytes() as copied:
        output = sharding.compute_attention(scaled_dot_product_attention, query, key, value, text_first=text_first)
        output = output.transpose(1, 2).flatten(2)
    return copied.total / query.nbytes, output.numpy(), rows


@pytest.mark.parametrize(
    ("size", "batch", "text", "text_first"),
    [(2, 1, 0, True), (2, 1, 8, True), (2, 2, 8, False), (2, 2, 0, False), (4, 2, 4, True), (4, 1, 0, True)],
)
def test_each_tensor_is_copied_once_each_way(pool: Pool, size: int, batch: int, text: int, text_first: bool) -> None:
    """Queries, keys, values and the output make four copies; a fifth is the output where text goes to every rank, or
    where the kernel has put it the other way."""
    query, key, value = make_projections(batch, IMAGE_TOKENS + text)
    expected = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    for result in pool.run(attend_together, size, batch, text, text_first):
        assert not isinstance(result, Exception), result
        copies, output, rows = result
        assert copies <= (5 if text or batch > 1 else 4)
        assert torch.equal(torch.from_numpy(output), expected[:, rows]), "not the same bit for bit"
