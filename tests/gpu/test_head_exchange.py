"""On a GPU attention reads queries, keys and values as they come in from a group, and is an operator of compiled code.

The group has one member: the collectives of several are not in these tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, scaled_dot_product_attention

from tridentserve.parallel import SequenceGroup, connect_store, make_group
from tridentserve.parallel.attention_calls import choose_compiled_attention
from tridentserve.parallel.head_exchange import HeadExchange
from tridentserve.parallel.token_sharding import CURRENT_SHARDING, TokenSharding

pytestmark = pytest.mark.gpu
TEXT, IMAGE, HEADS, CHANNELS = 32, 96, 4, 64


@pytest.fixture
def group(gpu: torch.device) -> Iterator[SequenceGroup]:
    group = make_group(connect_store(is_server=True), "alone", 0, 1, gpu, timeout_s=60.0)
    yield group
    group.close()


def make_projections(device: torch.device, batch: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return [
        torch.randn(batch, TEXT + IMAGE, HEADS, CHANNELS, generator=generator)
        .to(device, torch.bfloat16)
        .transpose(1, 2)
        for _ in range(3)
    ]


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize(("batch", "text"), [(1, 0), (1, TEXT), (2, TEXT)])
def test_every_kernel_reads_tokens_as_they_come_in(group: SequenceGroup, kernel: str, batch: int, text: int) -> None:
    projections = make_projections(group.device, batch)
    exchange = HeadExchange(group, [TEXT + IMAGE - text], text, text_first=False)
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        query, key, value = (each.contiguous() for each in projections)
        expected = scaled_dot_product_attention(query, key, value)
        query, key, value = exchange.collect_tokens(projections).unbind(0)
        output = scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(exchange.collect_heads(output), expected, rtol=2e-2, atol=2e-2)


def test_compiled_code_has_the_attention_inside(group: SequenceGroup) -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return choose_compiled_attention("text last")(scaled_dot_product_attention, gelu(query), key, value) + 1

    query, key, value = make_projections(group.device, 2)
    sharding = TokenSharding(group)
    sharding.shard(torch.zeros(1, IMAGE, 1))
    token = CURRENT_SHARDING.set(sharding)
    try:
        output = torch.compile(attend, dynamic=True, fullgraph=True)(query, key, value)
    finally:
        CURRENT_SHARDING.reset(token)
    expected = scaled_dot_product_attention(gelu(query), key, value) + 1
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
