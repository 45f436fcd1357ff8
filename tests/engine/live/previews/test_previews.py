"""Previews while a plan denoises: when they are due, what is told of them, and that they change nothing."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image

from tests.pipelines.models import load_stage, make_inputs, model_folder
from tests.support.waiting import until
from tridentserve.device import find_device
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.previews.due_previews import DuePreviews, list_partial_steps
from tridentserve.engine.live.previews.painter import PreviewPainter
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.worker.denoising import StepControl
from tridentserve.engine.live.worker.executor import StageExecutor
from tridentserve.parallel import SequenceGroup
from tridentserve.pipelines import PipelineAdapter
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.lora.lora_cache import LoraCache
from tridentserve.plans import DispatchPlan, PlanMember, Replica
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

Sketches = list[tuple[str, int, torch.Tensor]]


class HeldStages:
    """Replicas of a folder's stages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.loras = LoraCache()

    @contextmanager
    def use(self, replica: Replica, group: SequenceGroup | None) -> Iterator[PipelineAdapter]:
        yield load_stage(self._folder, replica.stage)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder("sd3", tmp_path_factory.mktemp("models"))


def denoise(
    folder: Path, requests: Sequence[GenerationInputs], watched: bool = True
) -> tuple[dict[str, Parcel], Sketches]:
    """The outputs of a plan that does all steps of requests a, b, ..., and the sketches that it gave."""
    executor, control, sketches = (
        StageExecutor("w", cast(Any, HeldStages(folder)), cast(Any, None), find_device("cpu")),
        StepControl(),
        [],
    )
    names, steps = "abc"[: len(requests)], (0, requests[0].num_inference_steps)
    plan = DispatchPlan(0, "m", (Stage.ENCODE, Stage.DIFFUSE), ("w",), tuple(PlanMember(name, steps) for name in names))
    control.on_preview = lambda *told: sketches.append(told)
    if watched:
        control.ask_to_tell()
    return executor.execute_plan(plan, dict(zip(names, requests, strict=True)), {}, control).outputs, sketches


@pytest.mark.parametrize(
    ("number", "num_steps", "steps"),
    [(3, 28, {7, 14, 21}), (1, 28, {14}), (2, 3, {1, 2}), (3, 2, {1}), (3, 1, set()), (0, 28, set())],
)
def test_partial_images_are_at_steps_in_equal_distances(number: int, num_steps: int, steps: set[int]) -> None:
    assert list_partial_steps(number, num_steps) == steps
    inputs = replace(make_inputs(), partial_images=number)
    due = DuePreviews({"r": inputs}, lambda: 0.0)
    assert {step for step in range(1, num_steps + 1) if due.claim("r", step, num_steps)} == steps
    assert not due.claim("other", 7, 28)


def test_a_request_may_want_a_preview_from_time_to_time() -> None:
    clock = [0.0]
    due = DuePreviews({"r": replace(make_inputs(), preview_interval_s=0.5)}, lambda: clock[0])
    claimed = []
    for step in range(1, 11):
        clock[0] += 0.2
        claimed.append(due.claim("r", step, 10))
    assert [step for step, is_due in enumerate(claimed, 1) if is_due] == [1, 4, 7], "and none of the last step"


def test_only_those_who_ask_get_sketches_and_only_while_watched(folder: Path) -> None:
    asks, silent = make_inputs(32, 32, 4, partial_images=3), make_inputs(32, 32, 4, seed=8)
    outputs, sketches = denoise(folder, [asks, silent])
    assert [(name, step) for name, step, _ in sketches] == [("a", 1), ("a", 2), ("a", 3)]
    assert all(sketch.shape == (1, 16, 4, 4) for _, _, sketch in sketches)
    unwatched, none = denoise(folder, [asks, silent], watched=False)
    assert none == []
    for name, parcel in outputs.items():
        assert torch.equal(parcel.tensors["latents"], unwatched[name].tensors["latents"])


def test_a_sketch_that_fails_ends_no_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no memory for it")

    asks = make_inputs(32, 32, 4, partial_images=3)
    expected, _ = denoise(folder, [asks])
    monkeypatch.setattr(DiffusersAdapter, "sketch", fail)
    outputs, sketches = denoise(folder, [asks])
    assert sketches == []
    assert torch.equal(outputs["a"].tensors["latents"], expected["a"].tensors["latents"])


@pytest.mark.parametrize("family", ["sd3", "flux"])
async def test_the_painter_tells_of_pictures_of_each_output(family: str, tmp_path: Path) -> None:
    source = ModelSource("m", model_folder(family, tmp_path))
    painter = PreviewPainter(HostCopies(tmp_path / "host", {"m": source}, torch.device("cpu")))
    asked = make_inputs(64, 96, 4, variant=family, partial_images=1, num_outputs=2, output_format="webp")
    _, ((_, _, sketch),) = denoise(source.folder, [asked])
    told: list[tuple[bytes, ...]] = []
    painting = [painter.paint("m", sketch, asked, told.append)]
    await until(lambda: bool(told))
    ((first, second),) = told
    pictures = [Image.open(io.BytesIO(file)) for file in (first, second)]
    assert [(picture.format, picture.size) for picture in pictures] == [("WEBP", (12, 8))] * 2
    assert first != second
    await painter.finish("m", painting)
    assert all(each.done() for each in painting)


async def test_a_model_without_colours_has_no_previews_and_no_error(tmp_path: Path) -> None:
    painter = PreviewPainter(HostCopies(tmp_path, {}, torch.device("cpu")))
    told: list[object] = []
    painting: list[Future[None]] = [painter.paint("gone", torch.zeros(1, 16, 4, 4), make_inputs(), told.append)]
    await painter.finish("gone", painting)
    assert painting[0].exception() is None
    assert told == []


async def test_a_model_of_the_same_name_gets_colours_of_its_own(tmp_path: Path) -> None:
    copies = HostCopies(tmp_path / "host", {"m": ModelSource("m", model_folder("sd3", tmp_path))}, torch.device("cpu"))
    painter, told = PreviewPainter(copies), list[Any]()
    for number in (1, 2):
        for _ in range(2):
            painter.paint("m", torch.ones(1, 16, 2, 2), make_inputs(partial_images=1), told.append)
        await until(lambda: len(told) == 2 * number)  # noqa: B023
        painter.drop_model("m")
        copies.drop_model("m")
        copies.add_model(ModelSource("m", model_folder("flux", tmp_path)))
    assert told[0] == told[1] != told[2] == told[3]
