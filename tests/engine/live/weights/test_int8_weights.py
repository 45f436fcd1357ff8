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
from tests.engine.live.weights.test_replica_store import CPU, D, Two, links, loads_of, two
from tests.pipelines.models import formats_of, make_inputs
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.weights.layered_weights import LayeredLayout
from tridentserve.models.layers import read_layer_sizes
from tridentserve.models.number_formats import NumberFormats
from tridentserve.pipelines import DenoisingState, PipelineAdapter, load_adapter
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.pipelines.weights import named_tensors
from tridentserve.stages import Stage

__all__ = ["links", "two"]
INT8 = {"E": "bfloat16", "D": "int8", "C": "bfloat16"}


@pytest.fixture(scope="module")
def source(tiny_cache: Path) -> ModelSource:
    return ModelSource("flux", ensure_tiny("flux", tiny_cache), NumberFormats.parse(INT8))


@pytest.fixture(scope="module")
def host(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> HostCopies:
    return HostCopies(tmp_path_factory.mktemp("host"), {"flux": source}, CPU)


@functools.cache
def load_whole(folder: Path) -> PipelineAdapter:
    return load_adapter(folder, frozenset({Stage.DIFFUSE}), formats=formats_of(folder, INT8))


def load_weightless(folder: Path) -> PipelineAdapter:
    return load_adapter(folder, frozenset({Stage.DIFFUSE}), formats=formats_of(folder, INT8), weights=False)


@functools.cache
def begin(folder: Path) -> DenoisingState:
    """The state before the first step."""
    encode = load_adapter(folder, frozenset({Stage.ENCODE}), formats=formats_of(folder, INT8))
    inputs = make_inputs(variant="flux")
    return load_whole(folder).prepare(encode.encode(inputs), inputs)


def denoise(adapter: PipelineAdapter, folder: Path) -> torch.Tensor:
    return adapter.step(begin(folder), 2).tensors["latents"]


def test_a_host_copy_has_half_the_bytes(host: HostCopies, source: ModelSource, tmp_path: Path) -> None:
    as_bfloat16 = ModelSource("flux", source.folder, NumberFormats.parse("bfloat16"))
    copy, other = host.get(D), HostCopies(tmp_path, {"flux": as_bfloat16}, CPU).get(D)
    held, expected = copy.tensors(copy.buffer), named_tensors(load_whole(source.folder))
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    in_int8 = sum(tensor.nbytes for tensor in held.values() if tensor.dtype == torch.int8)
    # The scales of layers as narrow as these count, and so do the gaps between tensors.
    assert 0.9 * in_int8 < copy.layout.nbytes / 1.1 < other.layout.nbytes * 0.6


async def test_a_peer_sends_them_exactly(two: Two, source: ModelSource) -> None:
    await two.a.prepare((D,))
    (load,) = await loads_of(two.b, D)
    assert load.source == "peer"
    expected = named_tensors(load_whole(source.folder))
    for store in (two.a, two.b):
        got = named_tensors(store.adapter(D))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert torch.equal(denoise(two.b.adapter(D), source.folder), denoise(load_whole(source.folder), source.folder))


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


@pytest.mark.parametrize("share", [STREAMED, HALF], ids=["streamed", "divided"])
def test_layers_in_turns_compute_what_whole_weights_compute(host: HostCopies, source: ModelSource, share: Any) -> None:
    adapter, (layered, other) = load_weightless(source.folder), (make_layered(host.get(D), share, i) for i in (0, 1))
    layered.attach(adapter)
    with layered.gather(cast(Any, GroupInOneProcess(other._kept))):
        given = denoise(adapter, source.folder)
    assert torch.equal(given, denoise(load_whole(source.folder), source.folder))
    layered.detach(adapter)
    scaled = read_layer_sizes(source.folder)[Stage.DIFFUSE].scale(host.get(D).layout.nbytes)
    kept_bytes = LayeredLayout(host.get(D), share, 0).num_bytes
    assert kept_bytes == pytest.approx(scaled.count_kept_bytes(share), rel=0.1, abs=16_000)
