"""A model's structure made without weights, given those of another process's copy: it works like the loaded one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.pipelines.models import ALL, families, load_stage, make_inputs, model_folder
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.errors import ModelFolderError
from tridentserve.pipelines import PipelineAdapter, load_adapter
from tridentserve.pipelines.weights import attach, detach, named_tensors
from tridentserve.stages import Stage


def load_from_copy(folder: Path, stage: Stage) -> PipelineAdapter:
    """An adapter that never read a weight, with copies of the tensors of one that did; tied ones are copied once. The
    copies lie as in the memory that workers share, aligned as the originals are: kernels sum in another order where
    weights are aligned in another way."""
    adapter = load_adapter(folder, frozenset({stage}), weights=False)
    assert all(tensor.is_meta for tensor in named_tensors(adapter).values())
    given = named_tensors(load_stage(folder, stage))
    originals = {str(id(tensor)): tensor.detach() for tensor in given.values()}
    parcel = Parcel(originals)
    layout = parcel.layout(as_in_memory=True)
    copies = Parcel.views(parcel.pack(layout), layout).tensors
    attach(adapter, {name: copies[str(id(tensor))] for name, tensor in given.items()})
    return adapter


@pytest.mark.parametrize("variant", families(*ALL))
def test_stages_on_copied_weights_are_bit_equal(variant: str, tiny_cache: Path) -> None:
    folder = model_folder(variant, tiny_cache)
    inputs = make_inputs(64, 64, 2, variant=variant)
    results = []
    for make in (load_stage, load_from_copy):
        encode, diffuse, decode = (make(folder, stage) for stage in Stage)
        state = diffuse.prepare(encode.encode(inputs), inputs)
        latents = diffuse.latents(diffuse.step(state, state.num_steps))
        results.append((latents, torch.from_numpy(decode.decode(latents, inputs))))
    (latents, pixels), (copied_latents, copied_pixels) = results
    assert all(torch.equal(tensor, copied_latents[name]) for name, tensor in latents.items())
    assert torch.equal(pixels, copied_pixels)


def test_detached_weights_are_gone_and_come_back(tiny_cache: Path) -> None:
    adapter = load_adapter(model_folder("flux", tiny_cache), frozenset({Stage.ENCODE}))
    before = dict(named_tensors(adapter))
    tied = len(before) - len({id(tensor) for tensor in before.values()})
    assert tied > 0
    detach(adapter)
    assert all(tensor.is_meta for tensor in named_tensors(adapter).values())
    attach(adapter, before)
    after = named_tensors(adapter)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert len(after) - len({id(tensor) for tensor in after.values()}) == tied


def test_weights_of_another_model_are_refused(tiny_cache: Path) -> None:
    adapter = load_adapter(model_folder("flux", tiny_cache), frozenset({Stage.DECODE}), weights=False)
    with pytest.raises(ModelFolderError, match="not of this model"):
        attach(adapter, {"vae.nothing": torch.zeros(1)})
