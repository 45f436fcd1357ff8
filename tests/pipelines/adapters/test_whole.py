"""Pipelines that are no family: their pixels are those of the stock pipelines, bit by bit, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.pipelines.whole_models import WHOLE_MODELS, make_stock_pixels, whole_folder
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.errors import InvalidRequestError, ModelFolderError, WorkerError
from tridentserve.models.model_folder import detect_family, stage_weights_bytes
from tridentserve.pipelines import DenoisingState, PipelineAdapter, load_adapter, weights
from tridentserve.pipelines.adapters.whole import WholeAdapter
from tridentserve.pipelines.encoder_memo import install_memo
from tridentserve.plans import Replica
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

torch.set_num_threads(1)

Folder = Callable[[str], Path]
QUICK = "stable_diffusion"
# What only these pipelines take, beside what all do.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "pixart_alpha": {"use_resolution_binning": False, "clean_caption": False},
    "ltx": {"num_frames": 9},
    "animate_diff": {"num_frames": 3},
}
MODELS = [
    pytest.param(name, marks=[pytest.mark.families, *([pytest.mark.quick] if name == QUICK else [])])
    for name in WHOLE_MODELS
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    cache_dir = tmp_path_factory.mktemp("whole")
    return lambda name: whole_folder(name, cache_dir)


def make_inputs(name: str, height: int = 64, width: int = 64, **changes: Any) -> GenerationInputs:
    given: dict[str, Any] = {
        "prompt": "a lighthouse in a storm",
        "shape": Shape(height, width, ARGUMENTS.get(name, {}).get("num_frames", 1)),
        "num_inference_steps": 3,
        "guidance_scale": 4.0,
        "seed": 7,
    }
    return GenerationInputs(**(given | changes))


def start(adapter: PipelineAdapter, inputs: GenerationInputs) -> DenoisingState:
    return adapter.prepare(adapter.encode(inputs), inputs)


def decode(adapter: PipelineAdapter, state: DenoisingState, inputs: GenerationInputs) -> NDArray[np.uint8]:
    return adapter.decode(adapter.latents(state), inputs)


@pytest.mark.parametrize("name", MODELS)
def test_pixels_are_those_of_the_stock_pipeline(folder: Folder, name: str) -> None:
    inputs = make_inputs(name, width=96, negative_prompt="fog")
    arguments = dict(ARGUMENTS.get(name, {}))
    if name not in ("animate_diff", QUICK):  # AnimateDiff makes one video at a time
        inputs = replace(inputs, num_outputs=2)
        arguments["num_videos_per_prompt" if "num_frames" in arguments else "num_images_per_prompt"] = 2
    stages = {stage: load_adapter(folder(name), frozenset({stage})) for stage in Stage}
    diffuse, condition = stages[Stage.DIFFUSE], stages[Stage.ENCODE].encode(inputs)
    assert sum(tensor.nbytes for tensor in condition.values()) == 1
    state = diffuse.prepare(condition, inputs)
    for step in range(1, inputs.num_inference_steps + 1):
        state = diffuse.step(state)
        assert state.step == step
    pixels = stages[Stage.DECODE].decode(diffuse.latents(state), inputs)
    assert pixels.std() > 10
    assert np.array_equal(pixels, make_stock_pixels(folder(name), inputs, **arguments))


@pytest.mark.families
@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_all_weights_are_in_d_and_come_from_a_host_copy(folder: Folder, name: str, tmp_path: Path) -> None:
    held = stage_weights_bytes(folder(name))
    assert (held[Stage.ENCODE], held[Stage.DECODE]) == (0, 0)
    host = HostCopies(tmp_path, {name: ModelSource(name, folder(name))}, torch.device("cpu"))
    copies = {stage: host.get(Replica(name, stage)) for stage in Stage}
    assert copies[Stage.DIFFUSE].layout.nbytes >= held[Stage.DIFFUSE] > 100_000
    adapters = {stage: load_adapter(folder(name), frozenset({stage}), weights=False) for stage in Stage}
    for stage, copied in copies.items():
        weights.attach(adapters[stage], copied.tensors(copied.buffer))
    inputs, diffuse = make_inputs(name), adapters[Stage.DIFFUSE]
    state = diffuse.step(diffuse.prepare({}, inputs), 3)
    pixels = adapters[Stage.DECODE].decode(diffuse.latents(state), inputs)
    assert np.array_equal(pixels, make_stock_pixels(folder(name), inputs, **ARGUMENTS.get(name, {})))
    weights.detach(diffuse)
    assert all(tensor.is_meta for tensor in weights.named_tensors(diffuse).values())
    assert not install_memo(diffuse).num_bytes


@pytest.mark.families
def test_what_is_asked_for_has_an_effect(folder: Folder) -> None:
    adapter, inputs = load_adapter(folder(QUICK), frozenset(Stage)), make_inputs(QUICK)
    changes: list[dict[str, Any]] = [
        {},
        {"prompt": "a desert"},
        {"negative_prompt": "fog"},
        {"seed": 8},
        {"guidance_scale": 9.0},
        {"num_inference_steps": 4},
    ]
    made = []
    for change in changes:
        asked = replace(inputs, **change)
        made.append(decode(adapter, adapter.step(start(adapter, asked), asked.num_inference_steps), asked))
    assert len({pixels.tobytes() for pixels in made}) == len(changes)


@pytest.mark.families
def test_a_request_that_is_left_leaves_nothing_to_the_next(folder: Folder) -> None:
    """Schedulers keep what they have seen, and the pipeline whether it was interrupted."""
    adapter, inputs = load_adapter(folder(QUICK), frozenset(Stage)), make_inputs(QUICK)
    assert isinstance(adapter, WholeAdapter)
    expected = make_stock_pixels(folder(QUICK), inputs)
    left = adapter.step(start(adapter, replace(inputs, seed=1)))
    adapter.end_steps()
    with pytest.raises(WorkerError, match="cannot go on where it did not begin"):
        adapter.step(left)
    taking_turns = [start(adapter, inputs), start(adapter, replace(inputs, seed=1))]
    assert len({adapter.batch_key(state) for state in taking_turns}) == 2
    for _ in range(3):
        taking_turns = adapter.advance(taking_turns)
    assert np.array_equal(decode(adapter, taking_turns[0], inputs), expected)


@pytest.mark.families
def test_a_size_that_the_pipeline_does_not_make_is_refused(folder: Folder) -> None:
    adapter = load_adapter(folder("animate_diff"), frozenset(Stage))
    inputs = make_inputs("animate_diff")
    with pytest.raises(InvalidRequestError, match="must be a multiple of 8"):
        adapter.encode(replace(inputs, shape=Shape(60, 64, 3)))
    with pytest.raises(InvalidRequestError, match="makes 1x3x64x64x3 of this request instead of 2x3x64x64x3"):
        adapter.step(start(adapter, replace(inputs, num_outputs=2)), 3)
    ltx = load_adapter(folder("ltx"), frozenset(Stage))
    with pytest.raises(InvalidRequestError, match="16 frames cannot be made"):
        ltx.encode(make_inputs("ltx", shape=Shape(64, 64, 16)))


@pytest.mark.families
def test_the_text_of_an_error_that_quotes_the_prompt_stays_on_the_worker(folder: Folder) -> None:
    adapter, inputs = load_adapter(folder(QUICK), frozenset({Stage.DIFFUSE})), make_inputs(QUICK)
    assert isinstance(adapter, WholeAdapter)
    for text, error in ((inputs.prompt, ValueError), ("too many steps", InvalidRequestError)):
        adapter.pipe.check_inputs = lambda *_, text=text: (_ for _ in ()).throw(ValueError(text))
        with pytest.raises(error, match=text):
            adapter.step(adapter.prepare({}, inputs))


@pytest.mark.families
def test_stages_that_were_not_loaded_say_so(folder: Folder) -> None:
    encode, inputs = load_adapter(folder(QUICK), frozenset({Stage.ENCODE})), make_inputs(QUICK)
    assert not weights.named_tensors(encode)
    with pytest.raises(ModelFolderError, match="diffuse stage of this StableDiffusionPipeline was not loaded"):
        encode.prepare({}, inputs)
    with pytest.raises(ModelFolderError, match="no previews"):
        encode.count_sketch_channels()
    assert detect_family(folder(QUICK)).default_shape == Shape(64, 64)
