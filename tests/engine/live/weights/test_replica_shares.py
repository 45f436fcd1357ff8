"""Replica stores of which the workers keep a part of D's weights: memory, peers, and stages that are used in turns."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

from tests.engine.live.weights.test_replica_store import (
    BLOCK,
    PLENTY,
    RESERVE,
    C,
    D,
    DirectPeer,
    E,
    host,
    links,
    loads_of,
    make_store,
    size_of,
    source,
)
from tests.pipelines.models import load_stage, make_inputs, start
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.transport.nixl_link import NixlLink
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.layered_weights import LayeredLayout
from tridentserve.engine.live.weights.peer_weights import PeerWeights
from tridentserve.errors import OutOfMemoryError, WorkerError
from tridentserve.stages import Stage
from tridentserve.weights_share import WeightsShare

__all__ = ["host", "links", "source"]
STREAMED = MappingProxyType({E: WeightsShare(streamed=True)})
HALVES = MappingProxyType({D: WeightsShare(unit=2)})


async def test_a_streamed_stage_fits_where_the_whole_one_does_not(host: HostCopies, source: ModelSource) -> None:
    memory_bytes = RESERVE + size_of(host, E) - 10_000
    with pytest.raises(OutOfMemoryError):
        await make_store(host, memory_bytes=memory_bytes).prepare((E,))
    store = make_store(host, "mapped", memory_bytes, shares=STREAMED)
    (load,) = await loads_of(store, E)
    assert load.num_bytes == store.resident_bytes < memory_bytes - RESERVE
    inputs = make_inputs(variant="flux")
    expected = load_stage(source.folder, Stage.ENCODE).encode(inputs)
    for _ in range(2):
        with store.use(E, None) as adapter:
            condition = adapter.encode(inputs)
        assert all(torch.equal(condition[name], tensor) for name, tensor in expected.items())
        # It leaves for another stage, and comes back.
        await store.prepare((C,), peak_bytes=memory_bytes - RESERVE - size_of(host, C))
        assert store.resident == (C,)
        await store.prepare((E,))


@pytest.fixture
def peers(links: tuple[NixlLink, NixlLink]) -> tuple[DirectPeer, PeerWeights, PeerWeights]:
    peer = DirectPeer(links[0])
    return peer, PeerWeights(links[0], {}, "here", BLOCK), PeerWeights(links[1], {"a": peer}, "here", BLOCK)


@pytest.mark.parametrize(("place", "source_of_b"), [(2, "peer"), (3, "host")])
async def test_shards_come_from_a_peer_that_keeps_the_same(
    host: HostCopies, peers: tuple[DirectPeer, PeerWeights, PeerWeights], place: int, source_of_b: str
) -> None:
    peer, weights_of_a, weights_of_b = peers
    a = make_store(host, "host", PLENTY, weights_of_a, HALVES, 0)
    b = make_store(host, "peer", PLENTY, weights_of_b, HALVES, place)
    peer.store = a
    await a.prepare((D,))
    (load,) = await loads_of(b, D)
    assert load.source == source_of_b
    alone = make_store(host, "host", PLENTY, shares=HALVES, place=place % 2)
    await alone.prepare((D,))
    layout = LayeredLayout(host.get(D), HALVES[D], 0)
    for layer in layout.layers:
        got, expected = (layout.find_shard(store._resident[D].loaded.buffer, layer) for store in (b, alone))
        # The second half ends with padding.
        size = min(len(got), layer.num_bytes - place % 2 * len(got))
        assert torch.equal(got[:size], expected[:size])


async def test_nobody_gets_weights_from_one_that_keeps_no_layer(
    host: HostCopies, peers: tuple[DirectPeer, PeerWeights, PeerWeights]
) -> None:
    peer, weights_of_a, weights_of_b = peers
    peer.store = make_store(host, "host", PLENTY, weights_of_a, STREAMED)
    await peer.store.prepare((E,))
    (load,) = await loads_of(make_store(host, "peer", PLENTY, weights_of_b), E)
    assert load.source == "host"


async def test_divided_weights_want_a_group(host: HostCopies) -> None:
    store = make_store(host, shares=HALVES)
    await store.prepare((D,))
    with pytest.raises(WorkerError, match="divided among 2 workers"), store.use(D, None):
        pass
    begun = start(host.source(D).folder, make_inputs(variant="flux"))
    with pytest.raises(WorkerError, match="outside a plan"):
        store.adapter(D).step(begun)
