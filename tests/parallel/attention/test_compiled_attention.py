"""Compiled blocks have the attention of a group inside, as one operator of one graph, whichever group it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

from tests.parallel.members import Member, Pool
from tridentserve.errors import GroupError
from tridentserve.parallel import sequence_parallel, ulysses
from tridentserve.pipelines import kernels

CHANNELS, HEADS = 32, 4
OPERATOR = "share_attention"
TOLERANCE = 1e-4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(CHANNELS, 3 * CHANNELS)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        parts = self.projections(hidden_states).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        query, key, value = parts.chunk(3, dim=1)
        output = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.0)
        return output.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.last = nn.LayerNorm(CHANNELS), Attention(), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.attention(self.norm(tokens))
        return tokens + functional.gelu(self.last(attended))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedder, self.output = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        blocks = [Block(), Block()]
        self.blocks = nn.ModuleList(blocks)
        self.requires_grad_(False)
        ulysses.install(self.embedder, [block.attention for block in blocks], self.output, text_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # No view, as outputs of blocks are none: the compiler tells them apart.
        tokens = functional.gelu(self.embedder(tokens))
        for block in self.blocks:
            tokens = block(tokens)
        output: torch.Tensor = self.output(tokens)
        return output


@contextmanager
def trace_graphs() -> Iterator[list[int]]:
    """Meanwhile code is compiled but for its kernels. Yields the attentions of groups in each graph, some of which the
    compiler makes twice."""
    graphs: list[int] = []

    def compile_graph(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(sum(OPERATOR in str(node.target) for node in graph.graph.nodes))
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")(graph, examples)
        return compiled

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with patch.object(kernels, "_make_backend", lambda attention: compile_graph):
        yield graphs


def run_compiled(member: Member) -> dict[str, Any]:
    """A compiled transformer in two groups, with tokens that are shared unevenly and others, and then alone."""
    tokens = [torch.randn(2, count, CHANNELS, generator=torch.Generator().manual_seed(count)) for count in (11, 16)]
    transformer = Transformer()
    graphs_then: list[int] = []
    attentions: list[int] = []
    expected = [transformer(each) for each in tokens]
    with trace_graphs() as graphs:
        for block in transformer.blocks:
            block.forward = kernels._compile_forward(block.forward, "sdpa")
        outputs = []
        for name in ("one", "another", "", "one"):
            with sequence_parallel(member.group(f"compiled-{name}") if name else None):
                outputs.append([transformer(each) for each in tokens])
            graphs_then.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            attentions.append(graphs[-1])
        lost = member.group("compiled-one")
        lost.close()
        with sequence_parallel(lost), pytest.raises(GroupError, match="failed or was closed") as caught:
            transformer(tokens[0])
    return {
        "graphs": graphs_then,
        "attentions": attentions,
        "breaks": dict(torch._dynamo.utils.counters["graph_break"]),
        "difference": max(
            float((output - other).abs().max())
            for each in outputs
            for output, other in zip(each, expected, strict=True)
        ),
        "error": str(caught.value),
    }


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_block_is_one_graph_with_its_attention_in_any_group(pool: Pool, size: int) -> None:
    """Three members cannot share out four heads, and make a ring."""
    for result in pool.run(run_compiled, size):
        assert not isinstance(result, Exception), result
        assert result["breaks"] == {}
        # The blocks are alike, as are groups: one graph for all of them in groups, and one for them alone.
        assert result["graphs"] == [1, 1, 2, 2]
        assert result["attentions"] == [1, 1, 0, 0]
        assert result["difference"] <= TOLERANCE


class TwoAttentions(nn.Module):
    """Two whose outputs do not depend on each other, as in blocks of Stable Diffusion 3.5."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = Attention(), Attention()
        self.requires_grad_(False)
        for attention in self.children():
            attention.forward = ulysses._shard_forward(attention.forward, "text last")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.first(tokens) + self.second(functional.gelu(tokens))
        return output


def find_order(member: Member) -> list[bool]:
    """For each attention in the graph that the compiler gets: does it take the result of the one before it?"""
    links: list[bool] = []

    def note_links(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> torch.fx.GraphModule:
        calls = [node for node in graph.graph.nodes if OPERATOR in str(node.target)]
        links.extend(call.args[-1] is before for before, call in zip([None, *calls], calls, strict=False))
        return graph

    tokens = torch.randn(2, 8, CHANNELS, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    kernels._make_backend.cache_clear()
    with patch.object(torch._dynamo, "lookup_backend", lambda name: aot_autograd(fw_compiler=note_links)):
        block = TwoAttentions()
        compiled = kernels._compile_forward(block.forward, "sdpa")
        with sequence_parallel(member.group("ordered")):
            sharding = ulysses.get_current_sharding()
            assert sharding is not None
            share = sharding.shard(tokens)
            assert float((compiled(share) - block(share)).abs().max()) <= TOLERANCE
    kernels._make_backend.cache_clear()
    return links


def test_attentions_of_a_graph_that_do_not_need_each_other_have_an_order(pool: Pool) -> None:
    """Their collectives have the order of the graph on all ranks."""
    assert pool.run(find_order, 2) == [[True, True], [True, True]]
