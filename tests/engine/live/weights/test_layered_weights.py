"""Weights whose layers are in memory in turns: they compute what whole weights compute, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pipelines.conftest import model
from tests.pipelines.models import ALL, families, load_stage, make_inputs, start
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.weights.host_copies import HostCopies, HostCopy
from tridentserve.engine.live.weights.layer_layout import split_into_layers
from tridentserve.engine.live.weights.layered_weights import LayeredLayout, LayeredWeights
from tridentserve.engine.live.weights.weights_loader import copy_blocks
from tridentserve.errors import WorkerError
from tridentserve.models.layers import read_layer_sizes
from tridentserve.pipelines import PipelineAdapter, load_adapter
from tridentserve.plans import Replica
from tridentserve.stages import Stage
from tridentserve.weights_share import LayerSizes, WeightsShare

__all__ = ["model"]
CPU = torch.device("cpu")
STREAMED, HALF = WeightsShare(streamed=True), WeightsShare(unit=2)
GARBAGE = 0xAB


def open_copy(folder: Path, stage: Stage, into: Path) -> HostCopy:
    return HostCopies(into, {"m": ModelSource("m", folder)}, CPU).get(Replica("m", stage))


def make_layered(copy: HostCopy, share: WeightsShare, shard: int = 0) -> LayeredWeights:
    """The weights in buffers that held something else before."""
    layout = LayeredLayout(copy, share, shard)
    kept = torch.full((layout.kept_bytes,), GARBAGE, dtype=torch.uint8)
    layout.fill(kept, lambda target, source: copy_blocks(target, source, 1 << 20))
    slots = [torch.full((layout.slot_bytes,), GARBAGE, dtype=torch.uint8) for _ in range(2)]
    return LayeredWeights(layout, kept, slots)


def stream_stage(folder: Path, stage: Stage, into: Path) -> tuple[PipelineAdapter, LayeredWeights]:
    adapter = load_adapter(folder, frozenset({stage}), weights=False)
    layered = make_layered(open_copy(folder, stage, into), STREAMED)
    layered.attach(adapter)
    return adapter, layered


@pytest.mark.parametrize("variant", families(*ALL, "wan-2.2"))
def test_streamed_layers_compute_what_whole_weights_compute(
    model: Callable[[str], Path], variant: str, tmp_path: Path
) -> None:
    folder, inputs = model(variant), make_inputs(variant=variant)
    streamed = {stage: stream_stage(folder, stage, tmp_path) for stage in Stage}
    encode, diffuse, decode = (streamed[stage][0] for stage in Stage)

    condition = encode.encode(inputs)
    expected = load_stage(folder, Stage.ENCODE).encode(inputs)
    assert condition.keys() == expected.keys()
    assert all(torch.equal(condition[name], tensor) for name, tensor in expected.items())

    begun = start(folder, inputs)
    whole = load_stage(folder, Stage.DIFFUSE)
    state, known = diffuse.step(begun, begun.num_steps), whole.step(begun, begun.num_steps)
    assert torch.equal(state.tensors["latents"], known.tensors["latents"])

    latents = whole.latents(known)
    assert np.array_equal(decode.decode(latents, inputs), load_stage(folder, Stage.DECODE).decode(latents, inputs))
    for adapter, layered in streamed.values():
        layered.detach(adapter)


def test_weights_that_left_come_back(model: Callable[[str], Path], tmp_path: Path) -> None:
    folder, inputs = model("sd3"), make_inputs()
    begun = start(folder, inputs)
    adapter, layered = stream_stage(folder, Stage.DIFFUSE, tmp_path)
    first = adapter.step(begun, 2).tensors["latents"]
    layered.detach(adapter)
    again = make_layered(open_copy(folder, Stage.DIFFUSE, tmp_path), STREAMED)
    again.attach(adapter)
    assert torch.equal(adapter.step(begun, 2).tensors["latents"], first)
    again.detach(adapter)


def test_divided_weights_compute_in_a_plan_only(model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = model("sd3")
    begun = start(folder, make_inputs())
    adapter = load_adapter(folder, frozenset({Stage.DIFFUSE}), weights=False)
    layered = make_layered(open_copy(folder, Stage.DIFFUSE, tmp_path), HALF)
    layered.attach(adapter)
    with pytest.raises(WorkerError, match="outside a plan"):
        adapter.step(begun, 1)
    with pytest.raises(WorkerError, match="divided among 2 workers"), layered.gather(None):
        pass


@pytest.mark.parametrize("variant", families(*ALL))
def test_the_planners_count_what_workers_keep(model: Callable[[str], Path], variant: str, tmp_path: Path) -> None:
    """From the headers of the model folder, at most a little less than what the packed tensors take."""
    folder = model(variant)
    for stage, sizes in read_layer_sizes(folder).items():
        copy = open_copy(folder, stage, tmp_path)
        scaled = sizes.scale(copy.layout.nbytes)
        for share in (STREAMED, HALF, WeightsShare(unit=4)):
            kept_bytes = LayeredLayout(copy, share, 0).num_bytes
            assert kept_bytes == pytest.approx(scaled.count_kept_bytes(share), rel=0.1, abs=16_000), (stage, share)


def test_every_byte_is_in_one_run(model: Callable[[str], Path], tmp_path: Path) -> None:
    for stage in Stage:
        copy = open_copy(model("wan"), stage, tmp_path)
        layers, rest = split_into_layers(copy)
        slots = [slot.name for run in (*layers, *rest) for slot in run.slots]
        assert sorted(slots) == sorted(slot.name for slot in copy.layout.slots)
        assert len({layer.path for layer in layers}) == len(layers) > 1


def test_sizes_by_layers() -> None:
    sizes = LayerSizes(1000, (3000, 2000))
    assert sizes.count_kept_bytes(WeightsShare()) == 6000
    assert sizes.count_kept_bytes(STREAMED) == 1000 + 2 * (3072 + 512)
    assert sizes.count_kept_bytes(HALF) == 1000 + 2 * (3072 + 512) + 2 * 1536
    assert sizes.count_supplied_bytes(STREAMED) == 5000
    assert sizes.count_supplied_bytes(HALF) == 2500
    assert sizes.count_supplied_bytes(WeightsShare()) == 0
    half = sizes.scale(3000)
    assert (half.rest_bytes, half.layers) == (500, (1500, 1000))
