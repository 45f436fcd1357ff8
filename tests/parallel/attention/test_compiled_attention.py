"""Compiled blocks have the attention of a group inside, as one operator of one graph, whichever group it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
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
