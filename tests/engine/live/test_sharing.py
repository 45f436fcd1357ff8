"""E of several requests in one pass, and C of one on several workers, on simulated workers and on real ones."""

from __future__ import annotations

import asyncio
import io
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.live import sharing
from tests.engine.live.configs import worker_configs
from tests.pipelines.loras import path_of, random_lora, save_lora, uses
from tests.pipelines.models import formats_of
from tests.support.decision_log import read_log
from tridentserve.engine.live.engine import LiveEngine
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.spawning.spawner import ActorSpawner
from tridentserve.engine.live.updates import CompletedUpdate, FailedUpdate, Update
from tridentserve.engine.options import EngineOptions
from tridentserve.engine.simulated import SimulatedEngine, SimulationOptions
from tridentserve.errors import LoraFileError
from tridentserve.models.lora_files import LoraUse, compute_digest
from tridentserve.models.number_formats import NumberFormats
from tridentserve.parallel import connect_store
from tridentserve.pipelines import PipelineAdapter, load_adapter
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.plans import PlacementPlan, Replica
from tridentserve.requests import GenerationInputs, RequestSpec, Shape
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import replay
from tridentserve.stages import Stage
from tridentserve.testing import MODEL

MEMORY_BYTES = 1 << 30
STEPS = 2
AT_ONCE = ("at-once-1", "at-once-2", "at-once-3")


def spec_of(name: str, shape: Shape, loras: tuple[LoraUse, ...] = ()) -> RequestSpec:
    keys = tuple(use.file.key for use in loras)
    return RequestSpec(name, MODEL, shape, STEPS, slo_s=1000.0, loras=keys)


def test_simulated_workers_share(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    specs = sharing.specs_of(MEMORY_BYTES)
    scheduler = sharing.scheduler(MEMORY_BYTES)
    options = SimulationOptions(decision_log=log, keep_plans=True)
    engine = SimulatedEngine(scheduler, specs, sharing.placement(), sharing.Times(), options)
    arrivals = [(0.0, spec_of(name, sharing.SMALL)) for name in AT_ONCE]
    later = [(50.0, spec_of("lone", sharing.SMALL)), (90.0, spec_of("large", sharing.LARGE))]
    result = engine.run([*arrivals, *later, (130.0, spec_of("apart", sharing.SMALL))])
    assert [one.outcome for one in result.requests] == ["finished"] * 6
    sharing.check_shared(read_log(log), AT_ONCE)
    sharing.check_decoded_by_two(read_log(log), "lone")
    sharing.check_decoded_by_two_auxiliaries(read_log(log), "apart")
    # Two of three encode at once for half a second, the third after them; two steps; C takes 2 s.
    assert sorted(one.latency_s or 0.0 for one in result.requests[:3]) == pytest.approx([4.5, 4.5, 5.0])
    assert result.requests[3].latency_s == pytest.approx(0.5 + 1.0 + 1.0)
    assert result.requests[4].latency_s == pytest.approx(0.5 + 1.0 + 1.5), "tiles take half as long again"
    assert result.requests[5].latency_s == pytest.approx(0.5 + 2.0 + 1.0)
    assert result.counts.frugal_plans == 1


@dataclass
class Service:
    engine: LiveEngine
    folder: Path
    log: Path

    async def ended(self, name: str, inputs: GenerationInputs, model: str = MODEL) -> Update:
        spec = replace(spec_of(name, inputs.shape, inputs.loras), model=model)
        updates = [update async for update in self.engine.generate(spec, inputs)]
        return updates[-1]

    async def generate(
        self, name: str, inputs: GenerationInputs, model: str = MODEL
    ) -> tuple[CompletedUpdate, np.ndarray[Any, Any]]:
        answer = await self.ended(name, inputs, model)
        assert isinstance(answer, CompletedUpdate), answer
        (png,) = answer.outputs
        return answer, np.asarray(Image.open(io.BytesIO(png)))


# The placement changes during the tests.
pytestmark = pytest.mark.in_order


@pytest.fixture(scope="module")
async def service(
    ray_cluster: None, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Service]:
    folder = Path(shutil.copytree(ensure_tiny("flux", tiny_cache), tmp_path_factory.mktemp("flux") / "flux"))
    for seed, name in enumerate(("ink", "pastel")):
        save_lora(folder, name, random_lora(folder, seed))
    store = connect_store(is_server=True)
    specs, sources = sharing.specs_of(MEMORY_BYTES), {MODEL: ModelSource(MODEL, folder)}
    configs = worker_configs(specs, sharing.placement(), sources, store.port, tiny_cache)
    log = tmp_path_factory.mktemp("sharing") / "decisions.jsonl"
    engine = LiveEngine(
        sharing.scheduler(MEMORY_BYTES),
        configs,
        ActorSpawner(0.1),
        lambda group, rank, plan_id: None,
        EngineOptions(decision_log=log),
        sharing.Times(),
    )
    await engine.start()
    yield Service(engine, folder, log)
    await engine.stop()
    del store


@pytest.fixture(scope="module")
def alone(service: Service) -> PipelineAdapter:
    """All stages in this process."""
    torch.set_num_threads(1)
    return load_adapter(service.folder, frozenset(Stage))


def inputs_of(prompt: str, shape: Shape = sharing.SMALL, loras: tuple[LoraUse, ...] = ()) -> GenerationInputs:
    return GenerationInputs(prompt, shape, STEPS, 3.5, seed=len(prompt), loras=loras)


def image_of(adapter: PipelineAdapter, inputs: GenerationInputs, tile: int | None = None) -> np.ndarray[Any, Any]:
    state = adapter.step(adapter.prepare(adapter.encode(inputs), inputs), STEPS)
    (image,) = adapter.decode(adapter.latents(state), inputs, tile)
    return np.asarray(image)


def assert_rounded_alike(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> None:
    assert np.abs(one.astype(int) - other.astype(int)).max() <= 1


async def test_live_workers_encode_together_what_comes_together(service: Service, alone: PipelineAdapter) -> None:
    """Each gets the image of its own prompt, as it would alone."""
    requests = {name: inputs_of(f"a {name} " * (index + 1)) for index, name in enumerate(AT_ONCE)}
    answers = await asyncio.gather(*(service.generate(name, inputs) for name, inputs in requests.items()))
    for (answer, image), inputs in zip(answers, requests.values(), strict=True):
        assert np.array_equal(image, image_of(alone, inputs)), "FLUX pads prompts to one length"
        assert answer.tiled is False
    sharing.check_shared(read_log(service.log), AT_ONCE)


async def test_what_cannot_be_encoded_does_not_take_the_rest_of_its_batch_with_it(
    service: Service, alone: PipelineAdapter
) -> None:
    good, bad = inputs_of("a good one"), replace(inputs_of("a bad one"), prompt=None)  # type: ignore[arg-type]
    (answer, image), failed = await asyncio.gather(
        service.generate("at-once-good", good), service.ended("at-once-bad", bad)
    )
    assert ("at-once-good", "at-once-bad") in sharing.plans_of_several(read_log(service.log))
    assert answer.retries == 1
    assert isinstance(failed, FailedUpdate)
    assert np.array_equal(image, image_of(alone, good))


async def test_live_workers_decode_one_image_together(service: Service, alone: PipelineAdapter) -> None:
    answer, image = await service.generate("lone", inputs_of("a lone one"))
    sharing.check_decoded_by_two(read_log(service.log), "lone")
    assert [(run.stage, len(run.workers)) for run in answer.timeline] == [
        ("encode", 1),
        ("diffuse", 2),
        ("decode", 2),
    ]
    assert_rounded_alike(image, image_of(alone, inputs_of("a lone one")))


def list_told_loras(log: Path, name: str) -> list[tuple[tuple[str, tuple[str, ...]], ...]]:
    """The LoRAs that workers told with the plans of a request that had D."""
    entries = read_log(log)
    plans = [plan for plan in sharing.plans_of(entries) if plan.request_ids[0].startswith(name)]
    diffuse = {plan.plan_id for plan in plans if Stage.DIFFUSE in plan.stages}
    events = [entry.event for entry in entries]
    return [one.loras for one in events if isinstance(one, ev.StageFinished) and one.plan_id in diffuse]


async def test_loras_change_the_image_of_their_request_only(service: Service, alone: PipelineAdapter) -> None:
    """On two workers, which each read the files, once, and tell; the next request on them sees nothing of it."""
    loras, plain = uses(service.folder, "ink", model=MODEL, pastel=-0.5), inputs_of("in ink")
    styled = replace(plain, loras=loras)
    answer, image = await service.generate("styled", styled)
    assert [len(run.workers) for run in answer.timeline] == [1, 2, 2]
    assert_rounded_alike(image, image_of(alone, styled))
    both = (f"{MODEL}:ink", f"{MODEL}:pastel")
    assert list_told_loras(service.log, "styled") == [(("w1", both), ("w2", both))]
    await service.generate("again", replace(styled, prompt="again in ink"))
    assert list_told_loras(service.log, "again") == [()]
    _, unstyled = await service.generate("unstyled", plain)
    assert_rounded_alike(unstyled, image_of(alone, plain))
    assert np.abs(image.astype(int) - unstyled.astype(int)).max() > 5


async def test_a_lora_is_checked_before_it_is_offered(service: Service) -> None:
    """In a process of the node, which knows of the model only what its folder says."""
    source, file = ModelSource(MODEL, service.folder), path_of(service.folder, "ink")
    assert await service.engine.models.check_lora(source, file) == compute_digest(file)
    odd = file.with_name("odd.safetensors")
    odd.write_bytes(b"no")
    with pytest.raises(LoraFileError, match=r"odd\.safetensors cannot be read"):
        await service.engine.models.check_lora(source, odd)


async def test_a_request_whose_lora_is_gone_fails_and_is_never_made_without_it(service: Service) -> None:
    (use,) = uses(service.folder, "ink", model=MODEL)
    changed = replace(use, file=replace(use.file, digest="0" * 64))
    for name, loras in (("gone", uses(service.folder, "gone", model=MODEL)), ("changed", (changed,))):
        failed = await service.ended(name, inputs_of("in ink", loras=loras))
        assert isinstance(failed, FailedUpdate)
        assert (failed.code, "ink" in failed.message or "gone" in failed.message) == ("bad_lora_file", True)


async def test_what_a_worker_cannot_decode_as_it_is_it_decodes_in_tiles(
    service: Service, alone: PipelineAdapter
) -> None:
    inputs = inputs_of("a wide one", sharing.LARGE)
    answer, image = await service.generate("large", inputs)
    assert answer.tiled is True
    whole, in_tiles = image_of(alone, inputs), image_of(alone, inputs, tile=512)
    assert_rounded_alike(image, in_tiles)
    assert np.abs(whole.astype(int) - in_tiles.astype(int)).max() > 1
    small, _ = await service.generate("small", replace(inputs, shape=sharing.SMALL))
    assert small.tiled is False


async def test_live_auxiliaries_decode_one_image_together(service: Service, alone: PipelineAdapter) -> None:
    """They get the latents of a worker that stays out of it."""
    answer, image = await service.generate("apart", inputs_of("one apart"))
    sharing.check_decoded_by_two_auxiliaries(read_log(service.log), "apart")
    assert [(run.stage, len(run.workers)) for run in answer.timeline] == [
        ("encode", 1),
        ("diffuse", 1),
        ("decode", 2),
    ]
    assert_rounded_alike(image, image_of(alone, inputs_of("one apart")))


async def test_a_model_that_comes_later_is_served_and_goes_again(service: Service) -> None:
    """The workers did not know of it when they started, nor of its LoRAs and its number formats."""
    formats = NumberFormats(encode="bfloat16")
    alone = load_adapter(service.folder, frozenset(Stage), formats=formats_of(service.folder, {"E": "bfloat16"}))
    models, inputs = service.engine.models, inputs_of("a late one", loras=uses(service.folder, "ink", model="late"))
    before = models.placement or sharing.placement()
    both = {name: held | {Replica("late", one.stage) for one in held} for name, held in before.replicas.items()}
    await models.prepare(ModelSource("late", service.folder, formats))
    await models.add(ev.ModelAdded("late", MODEL, slo_scale=5.0, placement=PlacementPlan(both, "late came", 2)))
    _, image = await service.generate("late", inputs, model="late")
    assert_rounded_alike(image, image_of(alone, inputs))
    models.close("late")
    await models.wait_until_drained("late")
    await models.remove(ev.ModelRemoved("late", replace(before, epoch=3)))
    assert isinstance(await service.ended("too late", inputs, model="late"), FailedUpdate)


async def test_nothing_is_left_and_the_log_replays(service: Service) -> None:
    handles = service.engine._fleet.list_handles(service.engine.list_live_workers())
    assert await asyncio.gather(*(handle.count_parcels() for handle in handles)) == [0, 0, 0, 0]
    for logged, effects in replay(read_log(service.log), sharing.scheduler(MEMORY_BYTES)):
        assert effects == logged.effects
