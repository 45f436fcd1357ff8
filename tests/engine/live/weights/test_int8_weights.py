"""Weights in int8 get into workers as others do, from the host copy or a peer, whole, streamed or divided. They have
half the bytes of those in bfloat16, and compute what the loaded model computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.engine.live.weights.test_layered_weights import HALF, STREAMED, make_layered
from tests.engine.live.weights.test_replica_store import CPU, D, E, Two, links, loads_of, two
from tests.pipelines.models import formats_of, make_inputs
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.layered_weights import LayeredLayout
from tridentserve.models.layers import read_layer_sizes
from tridentserve.models.number_formats import NumberFormats
from tridentserve.pipelines import DenoisingState, PipelineAdapter, load_adapter
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.pipelines.weights import named_tensors
from tridentserve.plans import Replica
from tridentserve.stages import Stage

__all__ = ["links", "two"]
INT8 = {"E": "int8", "D": "int8", "C": "bfloat16"}


@pytest.fixture(scope="module")
def source(tiny_cache: Path) -> ModelSource:
    return ModelSource("flux", ensure_tiny("flux", tiny_cache), NumberFormats.parse(INT8))


@pytest.fixture(scope="module")
def host(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> HostCopies:
    return HostCopies(tmp_path_factory.mktemp("host"), {"flux": source}, CPU)


@functools.cache
def load_whole(folder: Path, stage: Stage) -> PipelineAdapter:
    return load_adapter(folder, frozenset({stage}), formats=formats_of(folder, INT8))


def load_weightless(folder: Path, stage: Stage) -> PipelineAdapter:
    return load_adapter(folder, frozenset({stage}), formats=formats_of(folder, INT8), weights=False)


@functools.cache
def begin(folder: Path) -> DenoisingState:
    """The state before the first step."""
    inputs = make_inputs(variant="flux")
    return load_whole(folder, Stage.DIFFUSE).prepare(load_whole(folder, Stage.ENCODE).encode(inputs), inputs)


def compute(adapter: PipelineAdapter, folder: Path, stage: Stage) -> torch.Tensor:
    """The texts of a request, or its latents after two steps."""
    if stage is Stage.ENCODE:
        return adapter.encode(make_inputs(variant="flux"))["prompt_embeds"]
    return adapter.step(begin(folder), 2).tensors["latents"]


@pytest.mark.parametrize("replica", [E, D], ids=["E", "D"])
def test_a_host_copy_has_half_the_bytes(
    host: HostCopies, source: ModelSource, tmp_path: Path, replica: Replica
) -> None:
    as_bfloat16 = ModelSource("flux", source.folder, NumberFormats.parse("bfloat16"))
    copy, other = host.get(replica), HostCopies(tmp_path, {"flux": as_bfloat16}, CPU).get(replica)
    held, expected = copy.tensors(copy.buffer), named_tensors(load_whole(source.folder, replica.stage))
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    in_int8 = sum(tensor.nbytes for tensor in held.values() if tensor.dtype == torch.int8)
    # The scales of layers as narrow as these count, and so do embeddings, and the gaps between tensors.
    assert 0.7 * in_int8 < copy.layout.nbytes / 1.1 < other.layout.nbytes * 0.6


@pytest.mark.parametrize("replica", [E, D], ids=["E", "D"])
async def test_a_peer_sends_them_exactly(two: Two, source: ModelSource, replica: Replica) -> None:
    await two.a.prepare((replica,))
    (load,) = await loads_of(two.b, replica)
    assert load.source == "peer"
    whole = load_whole(source.folder, replica.stage)
    expected = named_tensors(whole)
    for store in (two.a, two.b):
        got = named_tensors(store.adapter(replica))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    given, known = (compute(each, source.folder, replica.stage) for each in (two.b.adapter(replica), whole))
    assert torch.equal(given, known)


class GroupInOneProcess:
    """The group of two members of which one has the buffer of the other, laid out like its own."""

    rank, size = 0, 2

    def __init__(self, of_other: torch.Tensor) -> None:
        self._of_other = of_other

    def start_gather(self, target: torch.Tensor, part: torch.Tensor, positions: list[int]) -> Callable[[], None]:
        begin = part.storage_offset()
        for position, buffer in zip(positions, (part, self._of_other[begin : begin + part.numel()]), strict=True):
            target.view(2, -1)[position] = buffer
        return lambda: None


@pytest.mark.parametrize(
    ("replica", "share"), [(E, STREAMED), (D, STREAMED), (D, HALF)], ids=["E-streamed", "D-streamed", "D-divided"]
)
def test_layers_in_turns_compute_what_whole_weights_compute(
    host: HostCopies, source: ModelSource, replica: Replica, share: Any
) -> None:
    folder, copy, stage = source.folder, host.get(replica), replica.stage
    adapter, (layered, other) = load_weightless(folder, stage), (make_layered(copy, share, i) for i in (0, 1))
    layered.attach(adapter)
    with layered.gather(cast(Any, GroupInOneProcess(other._kept))):
        given = compute(adapter, folder, stage)
    assert torch.equal(given, compute(load_whole(folder, stage), folder, stage))
    layered.detach(adapter)
    scaled = read_layer_sizes(folder, host.formats(replica))[stage].scale(copy.layout.nbytes)
    kept_bytes = LayeredLayout(copy, share, 0).num_bytes
    assert kept_bytes == pytest.approx(scaled.count_kept_bytes(share), rel=0.1, abs=16_000)
