"""Weights whose layers are in memory in turns: they compute what whole weights compute, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.pipelines.conftest import model
from tests.pipelines.models import ALL, families, load_stage, make_inputs, scale_input_images_less, start
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.weights.host_copies import HostCopies, HostCopy
from tridentserve.engine.live.weights.layer_layout import Layer, split_into_layers
from tridentserve.engine.live.weights.layered_weights import LayeredLayout, LayeredWeights
from tridentserve.engine.live.weights.weights_loader import copy_blocks
from tridentserve.errors import GroupError, WorkerError
from tridentserve.models.layers import read_layer_sizes
from tridentserve.pipelines import PipelineAdapter, load_adapter
from tridentserve.pipelines.weights import named_tensors
from tridentserve.plans import Replica
from tridentserve.stages import Stage
from tridentserve.weights_share import SLOT_ALIGNMENT_BYTES, LayerSizes, WeightsShare

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
    model: Callable[[str], Path], variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_input_images_less(monkeypatch)
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


class LateSupply:
    """A supply whose bytes come at the last moment, and that spoils a slot as soon as it may write there."""

    def __init__(self, run: torch.Tensor) -> None:
        self._run = run
        self.started: list[str | None] = []

    def start(self, layer: Layer, slot: torch.Tensor) -> Callable[[], None]:
        self.started.append(layer.path)
        target = slot[: layer.num_bytes]
        target.fill_(GARBAGE)
        return lambda: (target.copy_(self._run[layer.start : layer.start + layer.num_bytes]), None)[1]


class Chain(torch.nn.Module):
    """Layers that are called in any order."""

    def __init__(self, count: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(3 + i % 2, 3) for i in range(count))

    def forward(self, order: Iterable[int]) -> torch.Tensor:
        return torch.stack([self.layers[i](torch.ones(3 + i % 2)) for i in order])


@given(count=st.integers(1, 6), data=st.data())
def test_layers_are_right_in_whatever_order_they_are_called(count: int, data: st.DataObject) -> None:
    orders = data.draw(st.lists(st.lists(st.integers(0, count - 1), max_size=8), min_size=1, max_size=4))
    expected = [Chain(count)(order) if order else None for order in orders]
    adapter: Any = SimpleNamespace(pipe=SimpleNamespace(components={"m": Chain(count)}), is_rebuilt=False)
    tensors = named_tensors(adapter)
    parcel = Parcel(tensors)
    layout = parcel.layout()
    copy = HostCopy(layout, {name: name for name in tensors}, parcel.pack(layout))
    layered = make_layered(copy, STREAMED)
    layered._supply = supply = LateSupply(copy.buffer)
    layered.attach(adapter)
    for order, known in zip(orders, expected, strict=True):
        if known is not None:
            with torch.no_grad():
                assert torch.equal(adapter.pipe.components["m"](order), known)
    straight = [i for order in orders for i in order]
    if straight:
        assert supply.started[0] == f"m.layers.{straight[0]}"
    layered.detach(adapter)


def test_the_next_layer_comes_while_one_computes() -> None:
    """In the order of the last time, once that is known."""
    adapter: Any = SimpleNamespace(pipe=SimpleNamespace(components={"m": Chain(4)}), is_rebuilt=False)
    tensors = named_tensors(adapter)
    parcel = Parcel(tensors)
    layout = parcel.layout()
    layered = make_layered(HostCopy(layout, {name: name for name in tensors}, parcel.pack(layout)), STREAMED)
    layered._supply = supply = LateSupply(parcel.pack(layout))
    layered.attach(adapter)
    adapter.pipe.components["m"](range(4))
    assert supply.started == [f"m.layers.{i}" for i in (0, 1, 2, 3, 0)]
    supply.started.clear()
    for _ in range(3):
        adapter.pipe.components["m"]([0, 3])
    assert supply.started == ["m.layers.1", "m.layers.3"], "the slots hold both from then on"
    layered.detach(adapter)


def test_a_group_that_fails_leaves_nothing_in_the_slots(model: Callable[[str], Path], tmp_path: Path) -> None:
    """Members of the next group may know nothing of this one."""
    layered = make_layered(open_copy(model("sd3"), Stage.DIFFUSE, tmp_path), HALF)

    class LostGroup:
        rank, size = 0, 2

        def start_gather(self, *args: Any) -> Callable[[], None]:
            return self.fail

        def fail(self) -> None:
            raise GroupError("a member died")

    def compute() -> None:
        with layered.gather(cast(Any, LostGroup())):
            layered._start(0)
            layered._start(1)
            layered._finish(0)

    with pytest.raises(GroupError):
        compute()
    assert layered._inside == [None, None]
    assert layered._arriving == [None, None]


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
            # They count alignments for each layer and shard, which are much in models this small.
            spare_bytes = 16_000 + 3 * SLOT_ALIGNMENT_BYTES * len(sizes.layers)
            assert kept_bytes == pytest.approx(scaled.count_kept_bytes(share), rel=0.1, abs=spare_bytes), (stage, share)


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
    gaps = 3 * 1024
    assert sizes.count_kept_bytes(STREAMED) == 1000 + 2 * (3072 + 512) + gaps
    assert sizes.count_kept_bytes(HALF) == 1000 + 2 * (3072 + 512) + 2 * 1536 + gaps
    assert sizes.count_supplied_bytes(STREAMED, 1) == 5000
    assert sizes.count_supplied_bytes(HALF, 2) == 2500
    assert sizes.count_supplied_bytes(HALF, 4) == 3750
    half = sizes.scale(3000)
    assert (half.rest_bytes, half.layers) == (500, (1500, 1000))
